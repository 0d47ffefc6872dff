"""Colours. Roles are told apart by hues that stay distinct with any common colour-vision deficiency.

The first seven are the Okabe-Ito set (M. Okabe, K. Ito, "Color Universal Design", 2008) without yellow, which is too
faint for lines, the others come from P. Tol's "muted" scheme (Colour Schemes, 2021). Names stand beside every colour,
so none carries meaning alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from realrl.draw.text import MONO, SANS

ROLE_HUES = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#b5559a",
    "#c98a00",
    "#3d9fd8",
    "#882255",
    "#332288",
    "#999933",
    "#44aa99",
    "#cc6677",
    "#117733",
)


@dataclass(frozen=True)
class Theme:
    """Colours of one mode; `tint` is the share of paper in a call's fill, `lift` that of white in its outline."""

    paper: str
    ink: str
    muted: str
    line: str
    pill: str
    dataset: str
    tint: float
    lift: float
    soften: float


LIGHT = Theme(
    paper="#ffffff",
    ink="#1b2430",
    muted="#5c6773",
    line="#c3cad3",
    pill="#ffffff",
    dataset="#68737f",
    tint=0.89,
    lift=0.0,
    soften=0.18,
)
DARK = Theme(
    paper="#12161c",
    ink="#e8edf3",
    muted="#9aa6b2",
    line="#3b4552",
    pill="#1b212a",
    dataset="#93a0ad",
    tint=0.80,
    lift=0.28,
    soften=0.12,
)


def role_hue(index: int) -> str:
    """Return the colour of the role with this position in the graph; repeats after the last one."""
    return ROLE_HUES[index % len(ROLE_HUES)]


def mix(first: str, second: str, share: float) -> str:
    """Return ``(1 - share) * first + share * second``, channel by channel, of two colours like ``#0072b2``."""
    channels = zip(bytes.fromhex(first[1:]), bytes.fromhex(second[1:]), strict=True)
    return "#" + "".join(f"{round(a * (1 - share) + b * share):02x}" for a, b in channels)


def stylesheet(theme: Theme, n_roles: int, scope: str = "") -> str:
    """Return the CSS of the picture's classes.

    Args:
        theme: the colours.
        n_roles: rules ``.r0`` to ``.r<n_roles - 1>`` are made; ``.rd`` is the dataset.
        scope: selector that every rule is put under, such as ``:root[data-theme=dark]``.
    """
    rules = [
        ("text", f"font-family:{SANS};fill:{theme.ink}"),
        (".mono", f"font-family:{MONO}"),
        (".muted", f"fill:{theme.muted}"),
        (".paper", f"fill:{theme.paper}"),
        (".pill", f"fill:{theme.pill};stroke-width:1.1"),
        (".rule", f"stroke:{theme.line};stroke-width:1;fill:none"),
        (".edge", "fill:none;stroke-width:1.7;stroke-linecap:round"),
        (".version", "fill:none;stroke-width:1.7;stroke-dasharray:6 5;stroke-linecap:butt"),
        (".key", f"fill:{theme.ink}"),
        (".plain .shape", f"fill:{theme.pill};stroke:{theme.muted};stroke-width:1.4"),
        (".plain .edge,.plain .version", f"stroke:{theme.muted}"),
        (".plain .head", f"fill:{theme.muted}"),
    ]
    for name, hue in [*((f"r{i}", role_hue(i)) for i in range(n_roles)), ("rd", theme.dataset)]:
        strong = mix(hue, "#ffffff", theme.lift)
        soft = mix(strong, theme.paper, theme.soften)
        rules += [
            (f".{name} .shape", f"fill:{mix(hue, theme.paper, theme.tint)};stroke:{strong};stroke-width:1.8"),
            (f".{name} .inner", f"fill:none;stroke:{strong};stroke-width:1;stroke-opacity:.45"),
            (f".{name} .plate", f"fill:{theme.paper};stroke:{strong};stroke-width:1.1"),
            (f".{name} .pill", f"stroke:{mix(strong, theme.paper, 0.35)}"),
            (f".{name} .edge,.{name} .version", f"stroke:{soft}"),
            (f".{name} .head", f"fill:{soft}"),
            (f".{name} .tone", f"fill:{mix(strong, theme.ink, 0.25)}"),
        ]
    return "\n".join(
        f"{','.join(f'{scope} {part}'.strip() for part in selector.split(','))}{{{body}}}" for selector, body in rules
    )


def both_modes(rules: Callable[[Theme, str], str]) -> str:
    """Return the style of a page that is light unless the system or the reader asks for dark.

    Args:
        rules: returns the CSS of a mode, with every rule under a selector.
    """
    dark = _variables(DARK)
    system, chosen = ":root:not([data-theme=light])", ":root[data-theme=dark]"
    return "\n".join(
        [
            f":root{{{_variables(LIGHT)};color-scheme:light}}",
            rules(LIGHT, ""),
            "@media (prefers-color-scheme:dark){",
            f"{system}{{{dark};color-scheme:dark}}",
            rules(DARK, system),
            "}",
            f"{chosen}{{{dark};color-scheme:dark}}",
            rules(DARK, chosen),
        ]
    )


def _variables(theme: Theme) -> str:
    colours = {"paper": theme.paper, "ink": theme.ink, "muted": theme.muted, "line": theme.line, "panel": theme.pill}
    return ";".join(f"--{name}:{value}" for name, value in colours.items())
