"""Signals as the master takes them: raised before the first step, kept from then on, counted without a supervisor."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from realrl.runtime.processes import signals as module
from realrl.runtime.processes.signals import ORPHANED, SignalReceived, Signals

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, ORPHANED)


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Signals]]:
    """Makes `Signals` that handle this process's signals until the test ends."""
    monkeypatch.setattr(module, "SAME_KEYPRESS_S", -1.0)  # no two signals are one
    before = {signum: signal.getsignal(signum) for signum in ALL}

    def make(*, counts: bool, waits: bool) -> Signals:
        signals = Signals(counts=counts)
        signals.catch()
        if waits:
            signals.wait_for_step()
        return signals

    yield make
    for signum, handler in before.items():
        signal.signal(signum, handler)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_raises_before_there_is_a_step(caught: Callable[..., Signals], signum: signal.Signals) -> None:
    signals = caught(counts=False, waits=False)
    with pytest.raises(SignalReceived, match=f"interrupted by {signum.name}") as raised:
        send(signum)
    assert raised.value.exit_code == 128 + signum
    send(signum)  # shutdown is under way
    assert signals.received is None


def test_the_supervisor_counts_for_a_master_process(caught: Callable[..., Signals]) -> None:
    signals = caught(counts=False, waits=True)
    for _ in range(3):
        send(signal.SIGINT)
    assert signals.received == signal.SIGINT


def test_an_orphan_does_not_wait(caught: Callable[..., Signals]) -> None:
    caught(counts=False, waits=True)
    send(signal.SIGINT)
    with pytest.raises(SignalReceived, match="SIGTERM"):
        send(ORPHANED)


def test_without_a_supervisor_the_second_signal_raises(
    caught: Callable[..., Signals], monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = caught(counts=True, waits=True)
    monkeypatch.setattr(module, "SAME_KEYPRESS_S", 60.0)
    send(signal.SIGTERM)
    send(signal.SIGTERM)  # the same keypress
    assert signals.received == signal.SIGTERM
    monkeypatch.setattr(module, "SAME_KEYPRESS_S", -1.0)
    with pytest.raises(SignalReceived, match="SIGINT"):
        send(signal.SIGINT)


def test_nothing_is_raised_when_shutdown_is_under_way(caught: Callable[..., Signals]) -> None:
    signals = caught(counts=True, waits=True)
    signals.ignore()
    for signum in ALL:
        send(signum)
    assert signals.received is None
