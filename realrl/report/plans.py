"""The plan of a run, from its settings: where its calls run, and the picture of its graph.

Code of users is not run for it: a page about somebody's run folder must not import what that folder names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realrl.config.serialize import experiment_reference, with_paths_of
from realrl.draw.layout import lay_out
from realrl.draw.scene import TYPE_WORDS, make_scene
from realrl.draw.svg import document
from realrl.errors import Error
from realrl.experiment.discovery import experiment_names, load_run
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.graph.build import roles as roles_of
from realrl.planner.page.style import KIND_CLASSES
from realrl.planner.words import seconds_text
from realrl.report.run_files import RunFolder
from realrl.sched.story import ranks_text


@dataclass(frozen=True)
class KnownPlan:
    """A run's plan, or the reason why there is none."""

    plan: RunPlan | None
    reason: str = ""


def plan_of(run: RunFolder) -> KnownPlan:
    """Return the plan of a run of a registered experiment."""
    try:
        reference = experiment_reference(run.config) if run.config else ""
        if reference not in experiment_names():
            command = f": 'realrl graph {reference}' draws it" if reference else ""
            return KnownPlan(None, f"The picture is drawn for registered experiments only{command}.")
        experiment, config = load_run(with_paths_of(run.config))
        return KnownPlan(plan_run(config, experiment))
    except Error as error:
        return KnownPlan(None, f"The plan cannot be made again from {run.path.name}/config.json: {error.message}")


def picture_of(plan: RunPlan, step_s: Mapping[str, float]) -> str:
    """Return the graph as SVG.

    Args:
        step_s: seconds of each call in a step.
    """
    remarks = {name: f"{seconds_text(step_s[name])} of a step" for name in plan.allocations if name in step_s}
    scene = make_scene(plan.graph, plan.experiment.name, plan.allocations, remarks)
    return document(lay_out(scene), "", interactive=True)


def roles_in_order(plan: RunPlan) -> list[str]:
    """Return the roles of a plan in the order of their colours."""
    evaluating = () if plan.evaluation is None else plan.evaluation.mfcs
    return list(dict.fromkeys((*roles_of(plan.graph), *(mfc.role for mfc in evaluating))))


def calls_of(plan: RunPlan) -> dict[str, dict[str, Any]]:
    """Return call -> its role, kind, place and devices, in words, and the class of its kind."""
    evaluating = () if plan.evaluation is None else plan.evaluation.mfcs
    return {
        mfc.name: {
            "role": mfc.role,
            "kind": TYPE_WORDS[mfc.interface_type],
            "css": KIND_CLASSES[mfc.interface_type],
            "place": str(plan.allocation_of(mfc.name)),
            "devices": ranks_text(plan.allocation_of(mfc.name).mesh.ranks),
        }
        for mfc in (*plan.mfcs, *evaluating)
    }
