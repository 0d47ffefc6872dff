"""Many commands of one kind, one after the other."""

from __future__ import annotations

import itertools
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.command import Command, check, check_apart


def sweep(
    commands: st.SearchStrategy[Command], folder: Path, n: int, *, is_fixed: bool, is_apart: bool = False
) -> None:
    """Run `n` commands, each in a folder of its own; the same ones each time if `is_fixed`."""
    numbers = itertools.count()

    @settings(
        max_examples=n,
        deadline=None,
        database=None,
        derandomize=is_fixed,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(commands)
    def run(command: Command) -> None:
        (check_apart if is_apart else check)(command, folder / str(next(numbers)))

    run()
