"""Mermaid text of a scene, which code hosts and note-taking programs draw by themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator

from realrl.draw.loops import loop_text
from realrl.draw.scene import Card, Scene
from realrl.draw.theme import LIGHT, mix, role_hue
from realrl.graph.mfc import InterfaceType

_BRACKETS = {
    InterfaceType.GENERATE: ("([", "])"),
    InterfaceType.INFERENCE: ("[", "]"),
    InterfaceType.TRAIN_STEP: ("{{", "}}"),
}


def render_mermaid(scene: Scene) -> str:
    """Return a flowchart from left to right."""
    ids = {name: f"n{i}" for i, name in enumerate(scene.cards)}
    return "\n".join(
        [
            "---",
            f"title: {json.dumps(scene.title)}",
            "---",
            "flowchart LR",
            *(f"    {ids[name]}{_node(card)}" for name, card in scene.cards.items()),
            *_links(scene, ids),
            *_styles(scene, ids),
            "",
        ]
    )


def _node(card: Card) -> str:
    if card.mfc is None:
        return f'[("{_escape(card.label)}")]'
    lines = [f"<b>{_escape(card.label)}</b>", _escape(card.subtitle), *map(_escape, card.notes)]
    if card.plate:
        lines.append(f"<small>{_escape(card.plate)}</small>")
    opening, closing = _BRACKETS[card.mfc.interface_type]
    return f'{opening}"{"<br/>".join(lines)}"{closing}'


def _links(scene: Scene, ids: dict[str, str]) -> Iterator[str]:
    for pill in scene.pills:
        label = "<br/>".join(map(_escape, pill.keys))
        for consumer in pill.consumers:
            yield f'    {ids[pill.producer]} -->|"{label}"| {ids[consumer]}'
    for edge in scene.loops:
        yield f'    {ids[edge.before]} -.->|"{_escape(loop_text(edge))}"| {ids[edge.after]}'


def _styles(scene: Scene, ids: dict[str, str]) -> Iterator[str]:
    """Yield one class for each role and one for the dataset; links take the colour of the call that they leave."""
    sources = [pill.producer for pill in scene.pills for _ in pill.consumers] + [edge.before for edge in scene.loops]
    for index in sorted({card.role_index for card in scene.cards.values()}):
        hue = LIGHT.dataset if index < 0 else role_hue(index)
        name = "dataset" if index < 0 else f"role{index}"
        members = [card for card in scene.cards.values() if card.role_index == index]
        fill = mix(hue, LIGHT.paper, LIGHT.tint)
        yield f"    classDef {name} fill:{fill},stroke:{hue},color:{LIGHT.ink}"
        yield f"    class {','.join(ids[card.name] for card in members)} {name}"
        links = [str(i) for i, source in enumerate(sources) if scene.cards[source].role_index == index]
        if links:
            yield f"    linkStyle {','.join(links)} stroke:{hue}"


def _escape(text: str) -> str:
    """Replace characters that would end a label or start a tag by mermaid's own codes."""
    codes = {"#": "#35;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "&": "#amp;", "`": "#96;", "\n": " "}
    return "".join(codes.get(char, char) for char in text)
