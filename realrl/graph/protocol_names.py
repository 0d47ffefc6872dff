"""Names of the transfer protocols that a call may ask for; what they do is in `realrl.plan.protocols`."""

from __future__ import annotations

DEFAULT_PROTOCOL = "3D_PROTO"

_NAMES = [DEFAULT_PROTOCOL, "DP_PROTO", "ONE_TO_ALL", "ALL_TO_ALL", "3D_ALL_MICRO_DP", "3D_PP_ONLY"]


def protocol_names() -> tuple[str, ...]:
    """Every name that `MFCDef.protocol` may have: the built-in ones, then those that were registered."""
    return tuple(_NAMES)


def add_protocol_name(name: str) -> None:
    """Make a name known; one that is known already stays as it is."""
    if name not in _NAMES:
        _NAMES.append(name)
