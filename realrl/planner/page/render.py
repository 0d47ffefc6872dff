"""The page as text: tables, pictures, and the figures that its script draws from.

`page.html` is the page without them. Whatever a user has named is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape

from realrl.draw.html import page_of_facts
from realrl.draw.layout import lay_out
from realrl.draw.scene import TYPE_WORDS, make_scene
from realrl.draw.svg import document
from realrl.draw.theme import LIGHT, Theme, both_modes, stylesheet
from realrl.experiment.run_plan import RunPlan
from realrl.graph.build import roles as roles_of
from realrl.plan.memory.plan import show_bytes
from realrl.planner.page.memory import FIELDS, DeviceMemory, fullest_row, series_of
from realrl.planner.page.pictures import (
    CHART,
    LEFT,
    RIGHT,
    ROW,
    SHAPES,
    TOP,
    Looks,
    MemoryChart,
    Rival,
    group_words,
    height_of,
    memory_svg,
    rivals_svg,
    timeline_svg,
)
from realrl.planner.page.style import rules, swatches
from realrl.planner.page.timeline import TICKS, Group, Timeline, timeline_of
from realrl.planner.times import CallTimes, call_times
from realrl.planner.words import seconds_text, share_text
from realrl.sched.story import ranks_text
from realrl.sim.cluster import SimulatedRun
from realrl.sim.report import figures_of

_MOST_CHARTS, _MOST_OPTIONS = 8, 16
_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class PageContent:
    """A plan and its simulated run, which the page is about.

    Attributes:
        run: completed a step.
        notes: assumptions, such as machine and lengths.
        memory: None if it was not counted.
        rivals: other plans, and this one.
        bound_s: a period that no plan can beat under the fast model; None if nothing is proven.
        gap: share by which this plan's period, under the fast model, may exceed the best possible one.
    """

    plan: RunPlan
    run: SimulatedRun
    notes: Sequence[str] = ()
    memory: DeviceMemory | None = None
    rivals: Sequence[Rival] = ()
    bound_s: float | None = None
    gap: float = 0.0


def render_page(content: PageContent) -> str:
    """Return the page; it loads nothing."""
    return _Page(content).text()


def render_timeline(content: PageContent) -> str:
    """Return the timeline alone as SVG, in light colours."""
    looks = looks_of(content.plan)
    return timeline_svg(plan_timeline(content.plan, content.run), looks, style=rules(LIGHT, len(looks.roles)))


def looks_of(plan: RunPlan) -> Looks:
    """Return the calls of a plan with their colours, those of an evaluation behind the others."""
    evaluating = () if plan.evaluation is None else plan.evaluation.mfcs
    calls = {mfc.name: mfc for mfc in (*plan.mfcs, *evaluating)}
    return Looks(calls, tuple(dict.fromkeys((*roles_of(plan.graph), *(mfc.role for mfc in evaluating)))))


def plan_timeline(plan: RunPlan, run: SimulatedRun) -> Timeline:
    """Return the timeline of a plan's run."""
    return timeline_of(run, {name: plan.allocation_of(name).mesh.ranks for name in looks_of(plan).calls})


class _Page:
    def __init__(self, content: PageContent) -> None:
        self._content, self._plan, self._run = content, content.plan, content.run
        self._looks = looks_of(content.plan)
        self._timeline = plan_timeline(content.plan, content.run)
        self._figures = figures_of(content.run)
        self._period_s = self._figures.period_s

    def text(self) -> str:
        """Return the page."""
        plan, content = self._plan, self._content
        title = f"{plan.experiment.name}: a step in {seconds_text(self._period_s)}"
        n_roles = len(self._looks.roles)

        def style(theme: Theme, scope: str) -> str:
            picture = stylesheet(theme, n_roles, f"{scope} .picture")
            return "\n".join((picture, rules(theme, n_roles, f"{scope} .plot"), swatches(theme, n_roles, scope)))

        parts = {
            "STYLE": both_modes(style),
            "TIMELINE": timeline_svg(self._timeline, self._looks),
            "BOUNDS": self._bounds(),
            "MEMORY": self._memory(),
            "GRAPH": self._graph(),
            "CALLS": self._calls(),
            "PLANS": self._plans(),
            "DATA": json.dumps(self._data(), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        }
        subtitle = " · ".join((str(plan.cluster), *content.notes))
        return page_of_facts("realrl.planner.page", title, subtitle, self._facts(), parts)

    # ------------------------------------------------------------ what is shown

    def _facts(self) -> Iterable[tuple[str, str]]:
        _, steady = self._run.steady
        tokens = sum(step.report.metrics.get("n_tokens", 0.0) for step in steady) / len(steady)
        yield "a step", seconds_text(self._period_s)
        yield "tokens a second", f"{tokens / self._period_s:,.0f}"
        busy = sum(device.computing for device in self._figures.devices) / len(self._figures.devices)
        yield "devices compute", share_text(busy)
        bound_s = self._content.bound_s
        if bound_s:
            yield "no plan is faster than", seconds_text(bound_s)
            yield "gap, by the fast model", share_text(self._content.gap)
        memory = self._content.memory
        if memory is not None:
            rank = memory.fullest(range(self._run.n_ranks))
            peak = memory.peak(rank)
            if peak is not None:
                yield "fullest device", f"{show_bytes(memory.needs(peak[1]))} of {show_bytes(memory.capacity)}"

    def _bounds(self) -> str:
        rows = []
        for name, seconds in self._figures.bounds.items():
            share = seconds / self._period_s
            if share >= 0.001:
                bar = f'<span class="share" style="width:{100 * share:.1f}%"></span>'
                rows.append((escape(name), seconds_text(seconds), f"{share_text(share)}", bar))
        return _table(("what", "seconds of a step", "share", ""), rows)

    @cached_property
    def _charts(self) -> list[tuple[Group, list[tuple[str, MemoryChart]]]]:
        """Groups with the charts of devices that differ, the fullest first."""
        memory = self._content.memory
        if memory is None:
            return []
        found = []
        groups = [group for group in self._timeline.groups if group.calls]
        for group in groups:
            charts: dict[tuple[object, ...], tuple[int, str, MemoryChart]] = {}
            for row in (fullest_row(group, memory)[0], *group.rows):
                rank = memory.fullest(row.ranks)
                by_call, peak = memory.by_call(rank), memory.peak(rank)
                if peak is None:
                    continue
                call, usage = peak
                needs = memory.needs(usage)
                about = f"at most {show_bytes(needs)}\nin {call}"
                chart = MemoryChart(f"device {rank}", about, series_of(row, self._timeline.works, by_call))
                charts.setdefault(tuple(by_call.items()), (needs, f"device {rank}: {show_bytes(needs)}", chart))
            ordered = sorted(charts.values(), key=lambda one: -one[0])[:_MOST_OPTIONS]
            if ordered:
                found.append((group, [(name, chart) for _, name, chart in ordered]))
        fullest = sorted(found, key=lambda one: -max(sum(p.n_bytes) for p in one[1][0][1].pieces))[:_MOST_CHARTS]
        return [one for one in found if one in fullest]

    @property
    def _shown_charts(self) -> list[MemoryChart]:
        return [options[0][1] for _, options in self._charts]

    def _memory(self) -> str:
        memory = self._content.memory
        if memory is None or not self._charts:
            return '<p class="muted">The memory of this plan was not counted.</p>'
        note = (
            f"The fullest device of each group of alike ones; a plan may use {show_bytes(memory.capacity)} of each. "
            "Bytes are the most that a call may need, for the longest texts that the configuration allows."
        )
        picture = memory_svg(self._shown_charts, self._timeline.seconds, memory.capacity)
        return f'<p class="muted">{escape(note)}</p><div class="tools" id="devices"></div>{picture}'

    def _graph(self) -> str:
        remarks = {name: f"{seconds_text(call.seconds)} of a step" for name, call in self._figures.calls.items()}
        plan = self._plan
        own = {name: words for name, words in remarks.items() if name in plan.allocations}
        scene = make_scene(plan.graph, plan.experiment.name, plan.allocations, own)
        return document(lay_out(scene), "", interactive=True)

    def _calls(self) -> str:
        rows = []
        times, memory = call_times(self._run), self._content.memory
        for name, mfc in self._looks.calls.items():
            allocation, own = self._plan.allocation_of(name), times.get(name, CallTimes())
            figures = self._figures.calls.get(name)
            settings = [f"{mfc.n_mbs} micro-batches"] if mfc.n_mbs else []
            section = self._plan.config.models.get(mfc.role)
            if mfc.is_train and section is not None:
                stage = section.optimizer.zero_stage
                settings += [f"ZeRO {stage}"] if stage else []
                settings += ["checkpointing"] if section.activation_checkpointing else []
                settings += ["optimizer on the host"] if section.optimizer.offload else []
            elif mfc.role in self._plan.config.allocation.offload:
                settings.append("on the host between calls")
            place = f'<span class="swatch r{self._looks.roles.index(mfc.role)}"></span>{escape(name)}'
            ranks = allocation.mesh.ranks
            needs = "-"
            if memory is not None and name in memory.plan.calls:
                needs = show_bytes(max(memory.needs(usage) for usage in memory.plan.calls[name].values()))
            rows.append(
                (
                    place,
                    escape(f"{TYPE_WORDS[mfc.interface_type]} of {mfc.role}"),
                    escape(str(allocation)),
                    escape(ranks_text(ranks)),
                    escape(", ".join(settings) or "-"),
                    seconds_text(own.run),
                    seconds_text(own.before + own.after + own.rows),
                    share_text((figures.bound_s if figures else 0.0) / self._period_s),
                    needs,
                )
            )
        columns = ("call", "kind", "place", "devices", "settings", "seconds of a step", "parameters and rows",
                   "of what bounds a step", "fullest device")  # fmt: skip
        return _table(columns, rows)

    def _plans(self) -> str:
        rivals = self._content.rivals
        if not rivals:
            return ""
        lost = [rival for rival in rivals if rival.period_s is None]
        items = "".join(f"<li><b>{escape(rival.name)}</b>: {escape(rival.note)}</li>" for rival in lost)
        refused = f"<p>These cannot run here:</p><ul>{items}</ul>" if lost else ""
        return f"<section><h2>Other plans</h2>{rivals_svg(rivals, self._content.bound_s)}{refused}</section>"

    # ------------------------------------------------------------ what the script draws from

    def _data(self) -> dict[str, object]:
        timeline, looks, memory = self._timeline, self._looks, self._content.memory
        return {
            "ticks": TICKS,
            "seconds": timeline.seconds,
            "left": LEFT,
            "right": RIGHT,
            "top": TOP,
            "row": ROW,
            "chart": CHART,
            "shapes": SHAPES,
            "works": [
                {"call": work.name, "words": looks.words(work), "css": looks.css(work), "shape": looks.shape(work)}
                for work in timeline.works
            ],
            "groups": [
                {
                    "name": group_words(group)[0],
                    "rows": [[ranks_text(row.ranks), [n for bar in row.bars for n in bar]] for row in group.rows],
                }
                for group in timeline.groups
            ],
            "fields": FIELDS,
            "most": height_of(self._shown_charts, memory.capacity) / _MEGABYTE if memory and self._charts else 0,
            "memory": [
                {
                    "group": group_words(group)[0],
                    "options": [
                        [
                            name,
                            chart.name,
                            chart.about.split("\n"),
                            [[p.begin, p.end, *(n // _MEGABYTE for n in p.n_bytes)] for p in chart.pieces],
                        ]
                        for name, chart in options
                    ],
                }
                for group, options in self._charts
            ],
        }


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells are HTML."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
