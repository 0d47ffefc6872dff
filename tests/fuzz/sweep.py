"""The tests of every kind of input; a file whose `KINDS` has kinds imports them, and has a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.command import Command, Server, assert_promises, serving

IN_ALL = 10_000
Record = Callable[[str, object], None]


@dataclass(frozen=True)
class Kind:
    """Commands of one kind.

    Attributes:
        n_inputs: number among `IN_ALL` inputs of all kinds.
    """

    commands: st.SearchStrategy[Command]
    n_inputs: int


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("fuzz"), request.module.WHOLE()) as running:
        yield running


def test_some(server: Server, kind: Kind) -> None:
    sweep(kind.commands, server, 8, is_fixed=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands(server: Server, kind: Kind, request: pytest.FixtureRequest, record_property: Record) -> None:
    n = max(1, round(kind.n_inputs * request.config.getoption("--fuzz-inputs") / IN_ALL))
    sweep(kind.commands, server, n, is_fixed=False, record=record_property)


def sweep(
    commands: st.SearchStrategy[Command],
    server: Server,
    n: int,
    *,
    is_fixed: bool,
    record: Record = lambda name, value: None,
) -> None:
    """Run `n` commands, the same ones each time if `is_fixed`; record their number and the most that one took."""
    outcomes = []

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
        outcome = server.run(command)
        outcomes.append(outcome)
        assert_promises(outcome)

    try:
        run()
    finally:
        record("inputs", len(outcomes))
        record("longest", max((outcome.cpu_s for outcome in outcomes), default=0.0))
        record("largest", max((outcome.growth_bytes for outcome in outcomes), default=0))
