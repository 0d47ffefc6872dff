"""Rules of the house that no other tool checks: sizes, and names that may appear in one place only.

A file has at most 600 lines and a function at most 100. `torch.distributed` is imported in engine/ alone, `zmq` in
one file, and the words that choose a device or a collective backend stand in engine/device.py alone, except for the
layer that maps what megatron-core asks of CUDA to the CPU.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100
MAX_EXPERIMENT_LINES = 60
DEVICE_FILES = ("realrl/engine/device.py", "realrl/engine/backends/megatron_cpu.py")
DEVICE_WORDS = re.compile(r"""\.cuda\b|["']nccl["']|["']gloo["']""")


def sizes(path: Path, text: str, tree: ast.Module) -> list[str]:
    """Files and functions that are too long."""
    found = []
    n_lines = text.count("\n")
    limit = MAX_EXPERIMENT_LINES if path.is_relative_to(ROOT / "experiments") else MAX_FILE_LINES
    if n_lines > limit:
        found.append(f"{path}: {n_lines} lines, at most {limit} are allowed")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def places(path: Path, text: str, tree: ast.Module) -> list[str]:
    """Imports and words outside the one place where they belong."""
    name = path.relative_to(ROOT).as_posix()
    if not name.startswith("realrl/"):
        return []
    found = []
    for node in ast.walk(tree):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            if module.startswith("torch.distributed") and not name.startswith("realrl/engine/"):
                found.append(f"{path}:{node.lineno}: torch.distributed outside realrl/engine")
            if module.split(".")[0] == "zmq" and name != "realrl/runtime/transport/zmq.py":
                found.append(f"{path}:{node.lineno}: zmq outside realrl/runtime/transport/zmq.py")
            if module.split(".")[0] == "pickle":
                found.append(f"{path}:{node.lineno}: pickle")
    if name not in DEVICE_FILES:
        for number, line in enumerate(text.splitlines(), 1):
            if DEVICE_WORDS.search(line):
                found.append(f"{path}:{number}: device and backend names belong to realrl/engine/device.py")
    return found


def main() -> int:
    """Print every violation; returns 1 if there is one."""
    found: list[str] = []
    for folder in ("realrl", "experiments", "scripts", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text, str(path))
            found += sizes(path, text, tree) + sorted(set(places(path, text, tree)))
    print("\n".join(found) if found else "house: sizes and places are in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
