"""Conversion of SVG to PNG, with the fonts of the `viz` extra alone, so that all machines give the same picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from realrl.errors import UsageError

_ZOOM = 2.0
_REMEDY = "Install the viz extra (pip install 'realrl[viz]'), or write .svg, .html or .mmd, which need nothing."


def render_png(svg: str) -> bytes:
    """Render at twice the nominal size.

    Raises:
        UsageError: the packages of the `viz` extra are not installed.
    """
    fonts = font_folder()
    try:
        import resvg_py
    except ImportError as error:
        raise UsageError("a .png picture needs the package resvg_py", remedy=_REMEDY) from error
    names = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSansMono.ttf")
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=svg,
            zoom=_ZOOM,
            skip_system_fonts=True,
            font_files=[str(fonts / name) for name in names],
            font_family="DejaVu Sans",
            sans_serif_family="DejaVu Sans",
            monospace_family="DejaVu Sans Mono",
        )
    )


def font_folder() -> Path:
    """Return matplotlib's folder of DejaVu fonts, found without importing it, which is slow.

    Raises:
        UsageError: matplotlib is not installed.
    """
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise UsageError("a .png picture needs the fonts of the package matplotlib", remedy=_REMEDY)
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
