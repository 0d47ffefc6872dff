"""The master's plan of a run: its tracks, and the steps that are saved."""

from __future__ import annotations

from dataclasses import dataclass

from realrl.config.schema import SaveConfig
from realrl.sched.track.track_plan import TrackPlan

STEP_PLACEHOLDER = "{step}"
_NEVER = SaveConfig(every_steps=0, every_epochs=0, at_end=False)


@dataclass(frozen=True)
class MasterPlan:
    """The frozen input of `MasterState`.

    Args:
        main: the track of the experiment's own calls, with or without training.
        evaluation: the track that evaluates the models on the way; None: there is none.
        save: rules for the steps that are saved.
        checkpoint_directory: folder that ranks write a checkpoint into; ``{step}`` in it stands for the step.
    """

    main: TrackPlan
    evaluation: TrackPlan | None = None
    save: SaveConfig = _NEVER
    checkpoint_directory: str = ""


def plan_master(main: TrackPlan, evaluation: TrackPlan | None, checkpoint_directory: str) -> MasterPlan:
    """Return the plan of a run; a run that trains nothing is not saved.

    Args:
        main: from `plan_track`.
        evaluation: from `plan_track`, where the run is evaluated.
        checkpoint_directory: folder that ranks write a checkpoint into, with ``{step}`` where the step goes.
    """
    return MasterPlan(main, evaluation, main.config.save if main.trains else _NEVER, checkpoint_directory)
