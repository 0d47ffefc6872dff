"""Parts of Markdown that the tests of the documents look for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(document: Path) -> str:
    """For test ids."""
    return document.relative_to(ROOT).as_posix()


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [text for found, text in _BLOCK.findall(document.read_text(encoding="utf-8")) if found == language]


def inline_code(document: Path) -> list[str]:
    """Return what stands between single backticks outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", _BLOCK.sub("", document.read_text(encoding="utf-8")))


def links(document: Path) -> list[str]:
    """Targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))


def commands(document: Path, program: str) -> list[list[str]]:
    """Arguments of every call of `program` in shell blocks and inline."""
    lines = [line for text in blocks(document, "sh") for line in text.splitlines()] + inline_code(document)
    split = [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]
    return [words[1:] for words in split]


def first_column(document: Path, section: str) -> list[str]:
    """The inline code in the first column of the tables under a heading ``## section``."""
    text = document.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def files(document: Path) -> dict[str, str]:
    """Name -> content of the blocks of Python that are files: their first line is a comment with the name."""
    named = [(re.match(r"# (\w+\.py)\n", text), text) for text in blocks(document, "python")]
    return {name[1]: text for name, text in named if name is not None}


def own_options(document: Path) -> list[str]:
    """Options that the algorithms in a document declare."""
    return re.findall(r"^    (\w+): .* = key\(", "\n".join(blocks(document, "python")), re.MULTILINE)
