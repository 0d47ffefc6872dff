"""Colours of the page's pictures: a call has its role's hue, full for training, lighter for the other kinds."""

from __future__ import annotations

from realrl.draw.text import SANS
from realrl.draw.theme import Theme, mix, role_hue
from realrl.graph.mfc import InterfaceType

SHADES = {InterfaceType.TRAIN_STEP: 0.0, InterfaceType.GENERATE: 0.38, InterfaceType.INFERENCE: 0.64}
"""Share of paper in a call's colour."""

KIND_CLASSES = {
    InterfaceType.TRAIN_STEP: "train",
    InterfaceType.GENERATE: "gen",
    InterfaceType.INFERENCE: "inf",
}

# P. Tol's "bright" scheme (Colour Schemes, 2021), in the order of `realrl.planner.page.memory.FIELDS`
_MEMORY_HUES = (
    "#777777", "#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#999933"
)  # fmt: skip


def rules(theme: Theme, n_roles: int, scope: str = "") -> str:
    """Return the CSS of timeline, memory and bars.

    Args:
        n_roles: rules ``.r0`` to ``.r<n_roles - 1>`` are made.
        scope: selector that every rule is put under.
    """
    found = [
        ("text", f"font-family:{SANS};fill:{theme.ink}"),
        (".muted", f"fill:{theme.muted}"),
        (".paper", f"fill:{theme.paper}"),
        (".ground", f"fill:{mix(theme.paper, theme.ink, 0.045)}"),
        (".grid", f"stroke:{theme.line};stroke-width:1"),
        (".limit", f"stroke:{theme.ink};stroke-width:1.2;stroke-dasharray:5 4"),
        (".wait", f"fill:{mix(theme.paper, theme.ink, 0.38)}"),
        (".rows,.alone", f"fill:{mix(theme.paper, theme.ink, 0.55)}"),
        (".chain,.best", f"fill:{theme.ink}"),
        (".jump", f"stroke:{theme.ink};stroke-width:1.6"),
        (".rival", f"fill:{mix(theme.paper, theme.ink, 0.42)}"),
        (".tail", "opacity:.5"),
    ]
    for i in range(n_roles):
        strong = mix(role_hue(i), "#ffffff", theme.lift)
        found.append((f".r{i}.hook", f"fill:{mix(strong, theme.ink, 0.35)}"))
        for kind, name in KIND_CLASSES.items():
            fill = mix(strong, theme.paper, SHADES[kind])
            found.append((f".r{i}.{name}", f"fill:{fill}"))
            found.append((f".on-r{i}.{name}", f"fill:{_readable(fill, theme)}"))
    found += [(f".m{i}", f"fill:{hue}") for i, hue in enumerate(_MEMORY_HUES)]
    return "\n".join(
        f"{','.join(f'{scope} {part}'.strip() for part in selector.split(','))}{{{body}}}" for selector, body in found
    )


def swatches(theme: Theme, n_roles: int, scope: str = "") -> str:
    """Return the CSS of the roles' colours beside names in tables."""
    hues = (mix(role_hue(i), "#ffffff", theme.lift) for i in range(n_roles))
    return "\n".join(f"{scope} .swatch.r{i}{{background:{hue}}}".strip() for i, hue in enumerate(hues))


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2.2, "contrast ratio"), from 1 to 21."""
    a, b = sorted((_luminance(first), _luminance(second)))
    return (b + 0.05) / (a + 0.05)


def _readable(fill: str, theme: Theme) -> str:
    return max((theme.ink, theme.paper), key=lambda colour: contrast(fill, colour))


def _luminance(colour: str) -> float:
    channels = [c / 255 for c in bytes.fromhex(colour[1:])]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
