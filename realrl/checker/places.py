"""Lines of the user's files that findings are about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from realrl.checker.compare import Kind
from realrl.checker.diagnose import Finding
from realrl.checker.recording import Recording
from realrl.graph.mfc import MFCDef

_OURS = str(Path(__file__).resolve().parents[1])


class Places:
    """Finds ``file:line`` for findings.

    Args:
        base: recording of the baseline, with the places of functions.
        mfcs: call -> its definition.
    """

    def __init__(self, base: Recording, mfcs: Mapping[str, MFCDef]) -> None:
        self._places = {
            call: dict(one.places) for (step, call), seen in base.calls.items() for one in seen[:1] if step == 1
        }
        self._mfcs = mfcs

    def of(self, finding: Finding) -> str:
        """Return the line of the metric or key in the interface's method, or else the function; empty if none is known.

        A loss is looked for where the loss function begins. An interface of realrl's own has no place, but a function
        of the user that it was given, such as a reward, has.
        """
        for call, attribute in finding.attributes:
            method = self._places.get(call, {}).get("method", "")
            if _is_users(method):
                return _line_of(method, re.compile(rf"\.{re.escape(attribute.split('.')[-1])}\s*[-+*/]?=[^=]"))
        places = self._places.get(finding.call, {})
        kind = finding.kind
        is_inside = kind in (Kind.LOSS, Kind.STATISTIC, Kind.GRADIENT, Kind.WEIGHTS)
        place = places.get("loss", "") if is_inside else ""
        place = place if _is_users(place) else places.get("method", "")
        if not _is_users(place):
            return _given_function(self._mfcs[finding.call]) if finding.call in self._mfcs else ""
        names = finding.names if kind not in (Kind.LOSS, Kind.GRADIENT, Kind.WEIGHTS, Kind.NORMALISER) else ()
        return _line_of(place, *(_quoted(word) for name in names for word in (name, name.split("/")[-1])))


def _is_users(place: str) -> bool:
    return bool(place) and not place.startswith(_OURS)


def _given_function(mfc: MFCDef) -> str:
    """Return a function of the user among the arguments of an interface, as ``file.py:name``."""

    def strings(value: object) -> list[str]:
        if isinstance(value, Mapping):
            return [text for item in value.values() for text in strings(item)]
        return [value] if isinstance(value, str) else []

    return next((text for text in strings(mfc.interface.args) if ".py:" in text), "")


def _quoted(word: str) -> re.Pattern[str]:
    return re.compile(f"[\"']{re.escape(word)}[\"']")


def _line_of(place: str, *patterns: re.Pattern[str]) -> str:
    """Return the first line from a place on that matches a pattern, in their order; the place itself if none does."""
    file, _, line = place.rpartition(":")
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return place
    for pattern in patterns:
        for number in range(int(line) - 1, len(lines)):
            if pattern.search(lines[number]):
                return f"{file}:{number + 1}"
    return place
