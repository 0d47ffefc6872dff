"""Signs in the messages of gloo, NCCL and torch's store that an error comes from the loss of another worker.

Imports no torch: a worker that cannot even import it uses this too.
"""

from __future__ import annotations

import traceback

from realrl.errors import Error, TransportError

# In lower case: words for a process group in a message or a traceback, and words for a member that is gone or does not
# answer.
_OF_A_GROUP = ("gloo/", "processgroup", "torch/distributed", "torch.distributed", "tcpstore")
_IS_GONE = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection closed",
    "connection refused",
    "connection was likely closed",
    "pair is not connected",
    "remote process exited",
    "socket closed",
    "timed out",
)


def needs_peers(error: BaseException) -> bool:
    """True if a worker failed in an operation with others, so that the death of one of them may be the cause."""
    return isinstance(error, TransportError) or _tells(error, _OF_A_GROUP)


def lost_peer(error: BaseException) -> bool:
    """True if a worker failed because another one left a group or did not answer, or the connection to it broke."""
    return isinstance(error, TransportError) or (_tells(error, _IS_GONE) and _tells(error, _OF_A_GROUP))


def _tells(error: BaseException, marks: tuple[str, ...]) -> bool:
    cause = error.__cause__ if isinstance(error, Error) else error
    trace = "" if cause is None else "".join(traceback.format_exception(cause))
    told = f"{error}\n{trace}".lower()
    return any(mark in told for mark in marks)
