"""Pictures of a graph: svg, png, mermaid text, and one self-contained html page.

Calls are coloured by role and shaped by type; data edges carry their keys, dashed version edges carry their lag.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from realrl.draw.html import render_html
from realrl.draw.layout import lay_out
from realrl.draw.mermaid import render_mermaid
from realrl.draw.png import render_png
from realrl.draw.scene import Placement, make_scene
from realrl.draw.svg import render_svg
from realrl.draw.theme import LIGHT
from realrl.errors import UsageError, did_you_mean
from realrl.files import write_output

if TYPE_CHECKING:
    import networkx as nx

PictureFormat = Literal["svg", "png", "mmd", "html"]
FORMATS: tuple[PictureFormat, ...] = get_args(PictureFormat)


def draw(
    graph: nx.DiGraph,
    *,
    title: str,
    allocations: Mapping[str, Placement] | None = None,
    remarks: Mapping[str, str] | None = None,
    fmt: PictureFormat,
) -> bytes:
    """Draw a graph.

    Args:
        graph: from `build_graph`.
        title: heading of the picture.
        allocations: call -> its mesh and strategy; other calls are drawn without them.
        remarks: call -> a further line below its role and type.
        fmt: "svg", "png" (needs the `viz` extra), "mmd" (mermaid) or "html".

    Returns:
        The content of the file. The same arguments always give the same bytes.

    Raises:
        UsageError: the format is unknown, or a png was asked for without the `viz` extra.
    """
    if fmt not in FORMATS:
        raise UsageError(f"there are no pictures of format '{fmt}'", remedy=f"Formats: {', '.join(FORMATS)}.")
    scene = make_scene(graph, title, allocations, remarks)
    if fmt == "mmd":
        return render_mermaid(scene).encode()
    drawing = lay_out(scene)
    if fmt == "html":
        return render_html(drawing, graph, allocations).encode()
    svg = render_svg(drawing, LIGHT)
    return render_png(svg) if fmt == "png" else svg.encode()


def write_picture(
    path: str | Path,
    graph: nx.DiGraph,
    *,
    title: str,
    allocations: Mapping[str, Placement] | None = None,
    remarks: Mapping[str, str] | None = None,
) -> Path:
    """Draw a graph into a file, in the format that its suffix names.

    Returns:
        The path.

    Raises:
        UsageError: the suffix is unknown, the file cannot be written, or a png was asked for without the `viz` extra.
    """
    path = Path(path)
    known = {f".{fmt}": fmt for fmt in FORMATS}
    suffix = path.suffix.lower()
    if suffix not in known:
        what = f"the suffix '{path.suffix}'" if path.suffix else "no suffix"
        raise UsageError(
            f"cannot choose a format for the picture '{path}', which has {what}",
            remedy=f"Use one of {', '.join(known)}.{did_you_mean(suffix, known)}",
        )
    content = draw(graph, title=title, allocations=allocations, remarks=remarks, fmt=known[suffix])
    try:
        write_output(path, content)
    except OSError as error:
        raise UsageError(
            f"cannot write the picture '{path}': {error.strerror or error}",
            remedy="Use a file in a folder that exists and that you may write to.",
        ) from error
    return path
