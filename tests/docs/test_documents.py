"""Files, keys, modules and commands that the documents name exist."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from realrl.cli import main
from realrl.config.keys import key_of, known_keys, sections
from realrl.config.overrides import SHORT_KEYS
from realrl.experiment.discovery import list_experiments
from tests.docs.markdown import DOCUMENTS, ROOT, blocks, commands, files, inline_code, links, name_of, own_options
from tests.docs.tables import document_with, field_table, key_tables
from tests.helpers.assets import make_model_folder

FOLDERS = "(?:realrl|experiments|configs|scripts|tests|docs)"
NOT_KEYS = {
    "check",
    "key",
    "log_return_value",
    "max_staleness",
    "may_drop",
    "pp",
    "quiet",
    "tp",
}  # fields of calls, sizes
OWN_OPTIONS = {f"algorithm.{name}" for document in DOCUMENTS for name in own_options(document)}
EVERY_DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


@EVERY_DOCUMENT
def test_links_lead_somewhere(document: Path) -> None:
    for target in links(document):
        if not target.startswith("http"):
            assert (document.parent / target.partition("#")[0]).exists(), target


@EVERY_DOCUMENT
def test_files_exist(document: Path) -> None:
    for code in inline_code(document):
        path = re.match(rf"(?:python )?({FOLDERS}/[\w./*-]*)", code)
        if path and "<" not in code and "my_algorithm" not in code and ".html" not in code:
            assert list(ROOT.glob(path[1].rstrip("/"))), code


@EVERY_DOCUMENT
def test_modules_and_names_exist(document: Path) -> None:
    for name in re.findall(r"(?<![\w/.])realrl(?:\.\w+)+", " ".join(inline_code(document))):
        module, rest = name, []
        while importlib.util.find_spec(module) is None:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
        found = importlib.import_module(module)
        for part in rest:
            found = getattr(found, part)


def test_the_way_of_a_step_names_what_is_there() -> None:
    rows = re.findall(
        r"^\| \[([\w/.]+)\]\(\.\./([\w/.]+)\) \| `(\w+)` \|", (ROOT / "docs/one-step.md").read_text(), re.M
    )
    assert 20 <= len(rows) <= 25
    assert len({file for file, _, _ in rows}) == len(rows)
    for file, target, name in rows:
        assert file == target
        assert re.search(rf"^(class|def|async def) {name}\b", (ROOT / file).read_text(), re.MULTILINE), (file, name)


@EVERY_DOCUMENT
def test_keys_exist(document: Path) -> None:
    keys = {path: key for experiment in list_experiments() for path, key in known_keys(experiment).items()}
    named = " ".join(
        inline_code(document) + [text for language in ("sh", "text") for text in blocks(document, language)]
    )
    in_sections = re.findall(
        r"(?<![\w./])(?:dataset|models|calls|generation|algorithm|allocation|cluster|save|eval|recover)\.[\w.<>*]+",
        named,
    )
    alone = re.findall(r"(?<![\w./<\"'-])([a-z_]+)=[\w./\[{<-]", " ".join(inline_code(document)))
    alone = [key for key in alone if key not in NOT_KEYS]
    for path in [*in_sections, *alone]:
        path = re.sub(r"models\.(<role>|\*)", "models.actor", SHORT_KEYS.get(path, path))
        path = path.rstrip(".").removesuffix(".<call>")
        is_option = f"algorithm.{path}" in keys
        is_option |= path in OWN_OPTIONS or path == "algorithm.NAME"
        assert path == "models.actor" or key_of(path, keys) or path in sections(keys) or is_option, path


def test_the_table_of_keys_is_that_of_the_schema() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == document_with(key_tables(), field_table()), "run: python -m tests.docs.tables"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def newcomer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the files that the documents' commands speak of."""
    for folder in ("my_model", "my_teacher", "runs/teacher/checkpoints/latest/actor"):
        shutil.copytree(model, tmp_path / folder)
    (tmp_path / "my_data.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}))
    (tmp_path / "my_pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    labels = [{"prompt": "a", "answer": "b", "label": True}, {"prompt": "c", "answer": "d", "label": False}]
    (tmp_path / "my_labels.jsonl").write_text("\n".join(map(json.dumps, labels)))
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = {"questions": {"question": "a", "meta": {"gold": "b"}}, "talks": {"conversations": talk}}
    rows |= {name: {"prompt": "a", "answer": "b"} for name in ("math", "code")}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    [example] = blocks(ROOT / "README.md", "python")
    (tmp_path / "my_algorithm.py").write_text(example)
    for name, text in [*files(ROOT / "docs/write-your-own.md").items(), *files(ROOT / "docs/python.md").items()]:
        (tmp_path / name).write_text(text)
    with (tmp_path / "my_rewards.py").open("a") as rewards:
        rewards.write("\n\ndef score(prompt, response):\n    return 0.0\n")
    shutil.copytree(ROOT / "configs" / "fusion", tmp_path / "configs" / "fusion")
    (tmp_path / "docs").mkdir()
    for run in ("runs/mine", "runs/other", "runs/sweep/0"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@EVERY_DOCUMENT
def test_commands_are_accepted(document: Path, newcomer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in commands(document, "realrl"):
        if "NAME" in arguments or arguments in (["run"], ["fuse"], ["graph"]) or "--nodes" in arguments:  # which wait
            continue
        starts = arguments[0] in ("run", "eval", "gen")
        dry = [*arguments, "--dry-run"] if starts and "--dry-run" not in arguments else arguments
        if arguments[0] == "fuse":
            dry = [*arguments, "--rounds", "0", "--processes", "1"]  # without a search
        if arguments[0] == "check" and len(arguments) > 1:  # as far as the run that it makes
            words = [word for word in arguments[1:] if word.startswith("./") or "=" in word or word == arguments[1]]
            dry = ["run", *words, "--dry-run"]
        if (
            arguments == ["check"] or "--against" in arguments or arguments[0] in ("watch", "node")
        ):  # a run made elsewhere; no end but Ctrl-C
            continue
        if "my_algorithm" in arguments:  # CONTRIBUTING speaks of a registered one
            continue
        if "launcher=ray" in arguments and importlib.util.find_spec("ray") is None:
            continue
        assert main(dry) == 0, (arguments, capsys.readouterr().err)


def test_quoted_errors_are_those_of_the_code() -> None:
    source = " ".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "realrl").rglob("*.py")))
    table = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Common errors")[2]
    cells = re.findall(r"^\| (.*?) \|", table.partition("\n## ")[0], re.MULTILINE)
    quoted = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 8
    for message in quoted:
        for part in message.split(" ... "):
            assert part in source, message


@EVERY_DOCUMENT
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for [target, *_] in commands(document, "make"):
        assert target in targets


def test_the_pictures_are_those_of_todays_graph(tmp_path: Path) -> None:
    drawings = [words for words in commands(ROOT / "README.md", "realrl") if words[0] == "graph" and "--out" in words]
    assert len(drawings) == 2
    for arguments in drawings:
        drawn = tmp_path / Path(arguments[-1]).name
        assert main([*arguments[:-1], str(drawn)]) == 0
        assert drawn.read_bytes() == (ROOT / arguments[-1]).read_bytes(), f"run: realrl {' '.join(arguments)}"
