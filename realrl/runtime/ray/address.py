"""Address of the Ray cluster of a run, and the refusals that need no Ray."""

from __future__ import annotations

import importlib.util
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from realrl.config.schema import ClusterConfig
from realrl.errors import UsageError
from realrl.files import read_input
from realrl.runtime.ray.messages import AUTO, HOW_TO_START

VARIABLE = "RAY_ADDRESS"
_TRIED_S = 3.0
_MOST_BYTES = 1000


def check_ray(cluster: ClusterConfig, environment: Mapping[str, str]) -> str:
    """Return the address of the cluster, at which somebody answers: ``HOST:PORT``, or "auto".

    Ray itself would try an address at which nobody answers for minutes.

    Raises:
        UsageError: Ray is not installed, the address is none, or nobody answers.
    """
    if not _is_installed():
        raise UsageError("launcher=ray needs Ray, which is not installed", remedy="pip install 'realrl[ray]'")
    given = cluster.ray_address or environment.get(VARIABLE, "") or AUTO
    address = given if given != AUTO else last_started(environment)
    if address == AUTO:
        return AUTO
    source = "cluster.ray_address" if cluster.ray_address else VARIABLE
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{source}={given} is no address of a Ray cluster",
            remedy="Write HOST:PORT, as `ray start --head` tells it; `realrl run` must be on a machine of the cluster.",
        )
    try:
        socket.create_connection((host, int(port)), timeout=_TRIED_S).close()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"no Ray cluster answers at {address}: {why}", remedy=HOW_TO_START) from error
    return address


def _is_installed() -> bool:
    return importlib.util.find_spec("ray") is not None


def last_started(environment: Mapping[str, str]) -> str:
    """Return the address that the last `ray start` on this machine has noted; "auto" if there is none."""
    note = Path(environment.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", "ray_current_cluster")
    try:
        return read_input(note, most_bytes=_MOST_BYTES).decode().strip() or AUTO
    except (OSError, UnicodeDecodeError):
        return AUTO
