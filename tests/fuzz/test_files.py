"""Ten thousand inputs, this half: datasets, models, tokenizers, chat templates, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import files
from tests.fuzz.sweep import sweep

KINDS = {
    "JSON datasets": (files.json_datasets(), 900),
    "parquet datasets": (files.parquet_datasets(), 300),
    "model configurations": (files.model_configs(), 1000),
    "tensor files": (files.tensor_files(), 600),
    "tokenizers": (files.tokenizers(), 400),
    "chat templates": (files.templates(), 200),
    "checkpoints": (files.checkpoints(), 600),
}


@pytest.fixture(autouse=True, scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    files.warm_up(tmp_path_factory.mktemp("warm"))


@pytest.mark.parametrize("kind", KINDS)
def test_some(tmp_path: Path, kind: str) -> None:
    sweep(KINDS[kind][0], tmp_path, 8, is_fixed=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_thousands(tmp_path: Path, kind: str) -> None:
    sweep(KINDS[kind][0], tmp_path, KINDS[kind][1], is_fixed=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_in_processes_of_their_own(tmp_path: Path, kind: str) -> None:
    sweep(KINDS[kind][0], tmp_path, 6, is_fixed=False, is_apart=True)
