"""Ten thousand inputs, this half: command lines, YAML, allocations, experiment files, reward files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.settings import allocations, command_lines, experiments, reward_files, yaml_files
from tests.fuzz.sweep import sweep

KINDS = {
    "command lines": (command_lines(), 2500),
    "YAML files": (yaml_files(), 1200),
    "allocations": (allocations(), 800),
    "experiment files": (experiments(), 800),
    "reward files": (reward_files(), 700),
}


@pytest.mark.parametrize("kind", KINDS)
def test_some(tmp_path: Path, kind: str) -> None:
    sweep(KINDS[kind][0], tmp_path, 15, is_fixed=True)


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
