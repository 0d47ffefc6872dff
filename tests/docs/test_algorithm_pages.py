"""Every algorithm has its page, and the page is that of today's code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from realrl.experiment.discovery import experiment_names
from tests.docs.markdown import ROOT, links

FOLDER = ROOT / "docs" / "algorithms"
WRITE = "run: python scripts/make_algorithm_docs.py"
EVERY_ALGORITHM = pytest.mark.parametrize("name", experiment_names())


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_algorithm_docs", ROOT / "scripts" / "make_algorithm_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_a_page_for_each_experiment_and_no_other() -> None:
    assert sorted(page.stem for page in FOLDER.glob("*.md")) == sorted(experiment_names())
    assert sorted(picture.stem for picture in FOLDER.glob("*.svg")) == sorted(experiment_names())


def test_the_index_leads_to_every_page() -> None:
    listed = [
        Path(target).stem for target in links(ROOT / "docs" / "algorithms.md") if target.startswith("algorithms/")
    ]
    assert sorted(listed) == sorted(experiment_names())


@EVERY_ALGORITHM
def test_tables_are_those_of_the_experiment(script: ModuleType, name: str) -> None:
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert page == script.updated(page, name), WRITE


@EVERY_ALGORITHM
def test_the_picture_is_that_of_the_graph(script: ModuleType, name: str, tmp_path: Path) -> None:
    script.draw(name, tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == (FOLDER / f"{name}.svg").read_bytes(), WRITE


@EVERY_ALGORITHM
def test_a_page_has_picture_command_formula_and_reference(name: str) -> None:
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert f"({name}.svg)" in page
    assert f"realrl run {name} " in page
    for section in ("Formula", "Calls", "Options", "Reference"):
        assert f"\n## {section}\n" in page


def test_a_page_without_its_markers_is_refused(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="<!-- options -->"):
        script.updated("<!-- calls -->\n<!-- end -->\n", "sft")
