"""Errors of a worker that come from the loss of another one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from realrl.engine.peers import lost_peer, needs_peers
from realrl.errors import CallError, TransportError


def call_failed(cause: str, error: type[Exception] = RuntimeError) -> CallError:
    """An error that an interface raised, as its call reports it."""
    failed = CallError("it failed", call="gen")
    failed.__cause__ = error(cause)
    return failed


@pytest.mark.parametrize(
    ("error", "is_lost", "may_be_lost"),
    [
        (TransportError("cannot pull"), True, True),
        (
            RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44091"),
            True,
            True,
        ),
        (call_failed("File torch/distributed/x.py\nRuntimeError: Socket closed 10.0.0.2"), True, True),
        (call_failed("gloo/transport/tcp/pair.cc: Pair is not connected (10.0.0.1 <--> 10.0.0.2)"), True, True),
        (call_failed("gloo/transport/tcp/unbound_buffer.cc: Timed out waiting 60000ms for recv"), True, True),
        (call_failed("File torch/distributed/x.py\nshapes differ", ValueError), False, True),
        (call_failed("File torch/distributed/x.py, in recv\nsomething that nobody has seen yet"), False, True),
        (call_failed("File urllib/request.py\nConnection reset by peer", ConnectionResetError), False, False),
        (call_failed("mine", ValueError), False, False),
        (ValueError("mine"), False, False),
    ],
)
def test_a_broken_connection_is_the_loss_of_a_peer(error: Exception, is_lost: bool, may_be_lost: bool) -> None:
    assert (lost_peer(error), needs_peers(error)) == (is_lost, may_be_lost)


def test_a_worker_without_torch_can_ask() -> None:
    code = "import sys, realrl.runtime.worker.loop; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
