"""Width of text, without a font file.

The widths are those of DejaVu Sans, rounded up. The usual screen fonts are narrower, so text that fits by this measure
fits in any of them.
"""

from __future__ import annotations

import unicodedata

SANS = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"

_EM = {
    char: width
    for width, chars in (
        (0.32, "'ijlIJ ,.·"),
        (0.40, "/:;\\|f-()[]t!"),
        (0.50, '*_`r"–'),
        (0.57, "sz?cLF"),
        (0.62, "kvxyPTYoae"),
        (0.64, "hnuSbdgpq$0123456789{}E"),
        (0.70, "KAVXZBRC"),
        (0.79, "UNHDG&OQ"),
        (0.87, "#+<=>^~wM"),
        (1.00, "%mW@…"),
    )
    for char in chars
}
_OTHER_EM, _WIDE_EM, _MONO_EM, _BOLD = 0.84, 1.05, 0.605, 1.11


def text_width(text: str, size: float, *, bold: bool = False, mono: bool = False) -> float:
    """Return the width of one line at font size `size`, in the same unit."""
    em = 0.0
    for char in text:
        if unicodedata.east_asian_width(char) in "WF":
            em += _WIDE_EM
        elif unicodedata.combining(char):
            continue
        else:
            em += _MONO_EM if mono else _EM.get(char, _OTHER_EM) * (_BOLD if bold else 1)
    return em * size
