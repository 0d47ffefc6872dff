"""Lines of the user's files that findings are about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from realrl.checker.compare import Kind
from realrl.checker.diagnose import Finding
from realrl.checker.recording import Recording
from realrl.checker.variants import IN_MICRO_BATCHES
from realrl.config.policy_options import PolicyOptions
from realrl.experiment.loading import load_object, place_of_user_function
from realrl.experiment.pieces import chosen_pieces
from realrl.experiment.rewards import functions_of
from realrl.graph.mfc import InterfaceType, MFCDef

_OURS = str(Path(__file__).resolve().parents[1])


class Places:
    """Finds ``file:line`` for findings.

    Args:
        base: recording of the baseline, with the places of functions.
        mfcs: call -> its definition.
        options: the configuration's ``algorithm`` section, which chooses pieces.
    """

    def __init__(self, base: Recording, mfcs: Mapping[str, MFCDef], options: object = None) -> None:
        self._places = {
            call: dict(one.places) for (step, call), seen in base.calls.items() for one in seen[:1] if step == 1
        }
        self._mfcs = mfcs
        chosen = chosen_pieces(options) if isinstance(options, PolicyOptions) else ()
        self._pieces = [(piece.kind, place_of_user_function(piece.load())) for piece in chosen]

    def of(self, finding: Finding) -> str:
        """Return the line of the metric or key in the interface's method, or else the function; empty if none is known.

        A loss is looked for where the loss function begins. An interface of realrl's own has no place, but what the
        user gave it has: a reward function, or a piece.
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
            return self._given(finding)
        return _line_of(place, *_quoted_names(finding))

    def _given(self, finding: Finding) -> str:
        """Return the line of what the user gave to an interface of realrl's own, all if several may be to blame."""
        mfc = self._mfcs.get(finding.call)
        if mfc is None:
            return ""
        places = [place_of_user_function(load_object(name)) for name in functions_of(mfc.interface)]
        if not places:
            places = self._pieces_of(mfc, finding)
        found = [place for place in places if place]
        inside = [place for place in found if _line_of(place, *_quoted_names(finding)) != place]
        return _line_of(inside[0], *_quoted_names(finding)) if inside else " and ".join(found)

    def _pieces_of(self, mfc: MFCDef, finding: Finding) -> list[str]:
        """Return the places of pieces that a call runs, those that may be to blame first.

        Advantages are made of a whole batch, losses of a micro-batch.
        """
        kinds = ["sampler"] if mfc.interface_type is InterfaceType.GENERATE else []
        kinds = ["filter"] if mfc.interface.name == "filter" else kinds
        if mfc.is_train:
            is_cut = not finding.by_variant.keys().isdisjoint(IN_MICRO_BATCHES) or finding.kind is Kind.STATISTIC
            kinds = ["policy_loss"] if is_cut else ["advantage", "policy_loss"]
        return [place for kind in kinds for of_kind, place in self._pieces if of_kind == kind]


def _is_users(place: str) -> bool:
    return bool(place) and not place.startswith(_OURS)


def _quoted_names(finding: Finding) -> list[re.Pattern[str]]:
    """Return what finds the name of a key or metric in quotes."""
    if finding.kind in (Kind.LOSS, Kind.GRADIENT, Kind.WEIGHTS, Kind.NORMALISER):
        return []
    words = [word for name in finding.names for word in (name, name.split("/")[-1])]
    return [re.compile(f"[\"']{re.escape(word)}[\"']") for word in words]


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
