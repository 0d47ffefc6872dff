"""One self-contained page: the picture, and the details of each call after a click.

`page/page.html` is the page without them: its frame, its own style, and the script that handles clicks. Other pages of
realrl share its head, and among each other `page/base.css` and `page/base.js`; those with figures at their top, too,
`page/top.html`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from realrl.config.secrets import masked
from realrl.draw.layout import Drawing
from realrl.draw.scene import DATASET, TYPE_WORDS, Placement, Scene, hook_text
from realrl.draw.svg import document, node_ids
from realrl.draw.theme import both_modes, stylesheet
from realrl.graph.build import call, producers, readers, version_edges
from realrl.graph.mfc import MFCDef

if TYPE_CHECKING:
    import networkx as nx

Row = tuple[str, list[str]]

_HEAD = """\
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'<!--CONNECT-->">
<title><!--TITLE--></title>"""


def render_html(drawing: Drawing, graph: nx.DiGraph, allocations: Mapping[str, Placement] | None) -> str:
    """Return the page as text; it loads nothing."""
    scene = drawing.scene
    details = json.dumps(_details(scene, graph, allocations or {}), ensure_ascii=False).replace("<", "\\u003c")
    parts = {
        "TITLE": escape(scene.title),
        "STYLE": both_modes(lambda theme, scope: stylesheet(theme, len(scene.roles), f"{scope} .picture")),
        "PICTURE": document(drawing, "", interactive=True),
        "DETAILS": details,
    }
    return filled(_resource("page.html"), parts)


def page_of_facts(
    package: str, title: str, subtitle: str, facts: Iterable[tuple[str, str]], parts: Mapping[str, str]
) -> str:
    """Return a page that begins with figures, from ``page.html`` and ``page.css`` of a package.

    Args:
        title, subtitle, facts: text; a fact is a term and its value.
        parts: see `filled`; ``STYLE`` among them.
    """
    own = files(package)
    top = {
        "TITLE": escape(title),
        "OWN": own.joinpath("page.css").read_text(encoding="utf-8").rstrip("\n"),
        "HEADING": escape(title),
        "SUBTITLE": escape(subtitle),
        "FACTS": "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(value)}</dd></div>" for term, value in facts),
    }
    page = own.joinpath("page.html").read_text(encoding="utf-8")
    page = page.replace("<!--TOP-->", _resource("top.html").rstrip("\n"), 1)
    return filled(page, {**top, **parts})


def filled(page: str, parts: Mapping[str, str], *, connects: bool = False) -> str:
    """Return a page with the parts in their places, such as ``<!--TITLE-->``.

    Its head forbids it to load anything. ``BASE`` and ``SCRIPT`` are style and script that pages share.

    Args:
        connects: the page may ask the server that it came from for more.
    """
    connect = "; connect-src 'self'" if connects else ""
    shared = {"HEAD": _HEAD, "CONNECT": connect, "BASE": _resource("base.css"), "SCRIPT": _resource("base.js")}
    for name, content in {**shared, **parts}.items():
        before, place, after = page.partition(f"<!--{name}-->")
        if place:
            page = before + content + after
    return page


def _resource(name: str) -> str:
    return files("realrl.draw").joinpath("page", name).read_text(encoding="utf-8")


# ---------------------------------------------------------------- details


def _details(
    scene: Scene, graph: nx.DiGraph, allocations: Mapping[str, Placement]
) -> dict[str, dict[str, str | list[Row]]]:
    """Return node id -> contents of its panel: name, a line below it, and rows of a term with its values."""
    ids = node_ids(scene)
    found: dict[str, dict[str, str | list[Row]]] = {}
    for name in scene.cards:
        if name == DATASET:
            keys = sorted({key for pill in scene.pills if pill.producer == DATASET for key in pill.keys})
            rows = [("provides", [_produced(graph, key) for key in keys])]
            found[ids[name]] = {"name": "dataset", "about": "where samples start", "rows": rows}
            continue
        mfc = call(graph, name)
        state = "trained" if mfc.role in scene.trained_roles else "frozen"
        about = f"{TYPE_WORDS[mfc.interface_type]} on {mfc.model} ({state})"
        rows = [row for row in _rows(graph, mfc, allocations.get(name)) if row[1]]
        found[ids[name]] = {"name": name, "about": about, "rows": rows}
    return found


def _rows(graph: nx.DiGraph, mfc: MFCDef, place: Placement | None) -> Iterator[Row]:
    origin = producers(graph)
    shown = masked(mfc.interface.args)
    yield "interface", [mfc.interface.name, *(f"{name} = {value!r}" for name, value in shown.items())]
    yield "reads", [f"{_remapped(mfc, key)} from {origin.get(key, 'dataset')}" for key in mfc.input_keys]
    yield "produces", [_produced(graph, key) for key in mfc.output_keys]
    yield "batch", list(_batch(mfc))
    yield (
        "waits for",
        [f"{edge.before} of step i − {edge.lag}" for edge in version_edges(graph) if edge.after == mfc.name],
    )
    yield "before", [hook_text(hook) for hook in mfc.pre_hooks]
    yield "after", [hook_text(hook) for hook in mfc.post_hooks]
    if place is not None:
        yield "mesh", [str(place.mesh)]
        yield "strategy", [str(place.strategy)]


def _remapped(mfc: MFCDef, key: str) -> str:
    inside = mfc.input_key_remap.get(key, key)
    return key if inside == key else f"{key} (as {inside})"


def _produced(graph: nx.DiGraph, key: str) -> str:
    return f"{key} for {', '.join(readers(graph, key)) or 'nobody'}"


def _batch(mfc: MFCDef) -> Iterator[str]:
    yield f"n_seqs = {mfc.n_seqs}"
    for field in ("min_n_seqs", "n_mbs", "max_tokens_per_mb", "virtual_stages"):
        value = getattr(mfc, field)
        if value is not None:
            yield f"{field} = {value}"
    if mfc.n_minibatches != 1:
        yield f"n_minibatches = {mfc.n_minibatches}"
    if mfc.n_passes != 1:
        yield f"n_passes = {mfc.n_passes}"
    if mfc.balanced_dp:
        yield "balanced_dp = True"
    if mfc.max_staleness:
        yield f"max_staleness = {mfc.max_staleness}"
