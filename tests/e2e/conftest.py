"""Runs that tests of the command line start, and that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.live import LiveRun


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LiveRun]]:
    runs: list[LiveRun] = []

    def starter(*overrides: str, experiment: str = "ppo") -> LiveRun:
        runs.append(LiveRun(tmp_path, *overrides, experiment=experiment))
        return runs[-1]

    yield starter
    for run in runs:
        run.clean_up()
