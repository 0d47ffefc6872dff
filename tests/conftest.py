"""The whole suite: few hypothesis examples (many with --hypothesis-profile=thorough), signals, registrations."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from realrl.doctor import machine_checks
from realrl.experiment import pieces, registry
from realrl.plan import protocols

LONG = {"e2e", "ranks", "rewards", "processes"}  # folders whose tests start processes
_SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("default-run", max_examples=25, deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=_SLOW_MACHINE)
settings.load_profile("default-run")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-inputs", type=int, default=10_000, metavar="N", help="inputs of all kinds in tests/fuzz")
    parser.addoption("--verdicts", type=int, default=40, metavar="N", help="runs drawn in tests/doctor")
    parser.addoption("--verdicts-seed", type=int, default=1, metavar="SEED", help="seed of these draws")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that the processes of a parallel run end at the same time."""
    items.sort(key=lambda item: not LONG.intersection(item.path.parts))


def pytest_sessionstart() -> None:
    """A shell's background jobs ignore SIGINT, and so would every process that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def no_cuda_outside_of_its_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs of tests outside tests/gpu find no CUDA device, wherever they run: their numbers are the CPU's."""
    with pytest.MonkeyPatch.context() as patch:
        if Path(__file__).parent / "gpu" not in request.path.parents:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(autouse=True)
def own_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithms that one test registers are not there for the next one, whose own may have the same names."""
    for module in (registry, pieces):
        monkeypatch.setattr(module, "_registered", dict(module._registered))
    monkeypatch.setattr(protocols, "_PROTOCOLS", dict(protocols._PROTOCOLS))


@pytest.fixture(autouse=True)
def nobody_else_takes_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of doctor about other work on this machine would depend on the tests that run at the same time."""
    monkeypatch.setattr(machine_checks, "cores_of_others", lambda: 0.0)
