"""Origins of a call's sequences, whatever calls in between have named them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from realrl.graph.mfc import InterfaceType, MFCDef

TOKENS = "input_ids"  # the name under which interfaces know tokens of whole sequences


class Origin(NamedTuple):
    """A generate call, and a key that it gives."""

    call: MFCDef
    key: str


def origins(mfc: MFCDef, calls: Iterable[MFCDef]) -> list[Origin]:
    """Return the generate calls whose responses a call makes or computes on.

    A call computes on what its interface sees as `input_ids`; on all that it reads, if it sees none. A call that gives
    other sequences than it got, as one that keeps the best, gives some of those that it read.

    Args:
        mfc: a call of a graph that was built, so no call waits for itself.
        calls: all calls of the graph.
    """
    calls = tuple(calls)
    if mfc.interface_type is InterfaceType.GENERATE:
        return [Origin(mfc, key) for key in mfc.output_keys if mfc.own_name(key) == TOKENS]
    tokens = [key for key in mfc.input_keys if mfc.input_key_remap.get(key, key) == TOKENS]
    found: dict[tuple[str, str], Origin] = {}
    for key in tokens or mfc.input_keys:
        giver = next((one for one in calls if key in one.output_keys), None)
        if giver is not None:
            found |= {(origin.call.name, origin.key): origin for origin in origins(giver, calls)}
    return list(found.values())
