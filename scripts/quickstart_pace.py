"""Lengths of the quickstart that fit into its time: pure functions of measured seconds.

The time of a quickstart is a sum: steps of the reward model, steps of PPO, held-out prompts, and what is done once.
`REFERENCE` has the seconds of each part on one machine. A step's seconds here, divided by those there, are the slowness
of this machine, which predicts the parts that are still to come. Each part is predicted anew while it is under way.

Properties of `choose`:

- Lengths never grow; the steps are those of a rung, or those that the stage under way was begun with.
- The predicted end is within the limit if that of any lengths is; if none is, it is the earliest possible.
- PPO gets as many steps as fit, and the reward model at least as many as the rung has for them.
- Prompts become fewer only where PPO cannot: they save little time, and widen the error of the gain more than fewer
  steps of PPO lessen the gain.
- A stage under way goes on where that fits. Otherwise it begins anew, as a run with a schedule of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal

Stage = Literal["rw", "ppo"]

# Steps of PPO -> steps of the reward model that go with them. The last ones are the fewest that were seen to
# reach an accuracy of 0.85 and a VADER gain of three standard errors: a slower machine ends late rather than with less.
RUNGS: Mapping[int, int] = {10: 66, 9: 62, 8: 58, 7: 54, 6: 48}
# Steps of the reward model -> its learning rate, if not the preset's. 48 steps reached an accuracy of 0.885 with this
# one and 0.850 with the preset's, on the same 400 pairs.
LEARNING_RATES: Mapping[int, float] = {48: 1e-4}
# The VADER gain of the shortest lengths was seen to be 3.6 standard errors over 448 prompts: these leave three.
LEAST_PROMPTS = 320
PROMPTS_AT_A_TIME = 64
LATE_S, LATE_SHARE = 60.0, 0.1  # least delay that is told, in seconds and as a share of the whole time
N_UNSTEADY = 1  # first steps of a stage, which are slower than the others
N_MEASURED: Mapping[Stage, int] = {"rw": 3, "ppo": 1}  # steps after those that are enough to decide on
N_RECENT: Mapping[Stage, int] = {"rw": 8, "ppo": 2}  # last steps whose mean is the present speed
RESERVE = 0.08  # share of the predicted time that is kept free by lengths that PPO is not under way with


@dataclass(frozen=True)
class Lengths:
    """Steps of the reward model and of PPO, and prompts of the evaluation."""

    rw_steps: int
    ppo_steps: int
    n_prompts: int = 448


@dataclass(frozen=True)
class Costs:
    """Seconds of a step of each stage and of a prompt, and of what each does once: start, save, score pairs."""

    rw_step_s: float
    ppo_step_s: float
    prompt_s: float
    rw_once_s: float
    ppo_once_s: float
    eval_once_s: float

    def times(self, factor: float) -> Costs:
        """Return the costs on a machine that takes `factor` times as long."""
        return Costs(*(factor * seconds for seconds in astuple(self)))


@dataclass(frozen=True)
class Choice:
    """Lengths to run.

    Attributes:
        begins_anew: the stage under way has another length and must begin anew.
        left_s: predicted seconds from now to the end.
        fits: the end is within the limit.
    """

    lengths: Lengths
    begins_anew: bool
    left_s: float
    fits: bool


# Two vCPUs with AVX-512, but without instructions for bfloat16.
REFERENCE = Costs(rw_step_s=8.0, ppo_step_s=65.0, prompt_s=0.175, rw_once_s=25.0, ppo_once_s=45.0, eval_once_s=52.0)


def step_seconds(stage: Stage, seconds: Sequence[float]) -> float | None:
    """Return the present seconds per step, from those of all steps so far; None while they say too little."""
    steady = seconds[N_UNSTEADY:]
    if len(steady) < N_MEASURED[stage]:
        return None
    recent = steady[-N_RECENT[stage] :]
    return math.fsum(recent) / len(recent)


def slowness(stage: Stage, step_s: float) -> float:
    """Return how many times as long as on the reference machine a step takes."""
    return step_s / (REFERENCE.rw_step_s if stage == "rw" else REFERENCE.ppo_step_s)


def choose(stage: Stage, lengths: Lengths, *, n_done: int | None, limit_s: float, costs: Costs) -> Choice:
    """Choose the lengths for the rest of the quickstart.

    Args:
        stage: stage under way, or to begin.
        lengths: those chosen before.
        n_done: complete steps of the stage; None before it begins.
        limit_s: seconds from now in which all should be done.
    """
    choices = []
    for candidate, begins_anew in _candidates(stage, lengths, is_under_way=n_done is not None):
        left_s = _left_s(stage, candidate, 0 if begins_anew or n_done is None else n_done, costs)
        is_bound = stage == "ppo" and n_done is not None and not begins_anew
        fits = left_s * (1 if is_bound else 1 + RESERVE) <= limit_s
        choice = Choice(candidate, begins_anew, left_s, fits)
        if fits:
            return choice
        choices.append(choice)
    return min(choices, key=lambda choice: choice.left_s)


def _candidates(stage: Stage, lengths: Lengths, *, is_under_way: bool) -> list[tuple[Lengths, bool]]:
    """List lengths, best first, and whether they make the stage under way begin anew."""
    begun = [(lengths, False)] if stage == "ppo" and is_under_way else []
    rungs = []
    for ppo_steps, rw_steps in RUNGS.items():
        if stage == "ppo" and ppo_steps < lengths.ppo_steps + (not is_under_way):
            rungs.append((replace(lengths, ppo_steps=ppo_steps), is_under_way))
        elif stage == "rw" and ppo_steps <= lengths.ppo_steps:
            if lengths.rw_steps >= rw_steps:
                rungs.append((replace(lengths, ppo_steps=ppo_steps), False))
            if lengths.rw_steps > rw_steps:
                rungs.append((replace(lengths, ppo_steps=ppo_steps, rw_steps=rw_steps), is_under_way))
    shortest = [candidate for candidate in rungs if candidate[0].ppo_steps == rungs[-1][0].ppo_steps]
    return [*begun, *_with_fewer_prompts(begun), *rungs, *_with_fewer_prompts(shortest)]


def _with_fewer_prompts(candidates: Sequence[tuple[Lengths, bool]]) -> list[tuple[Lengths, bool]]:
    return [(replace(each, n_prompts=min(each.n_prompts, LEAST_PROMPTS)), anew) for each, anew in candidates]


def _left_s(stage: Stage, lengths: Lengths, n_done: int, costs: Costs) -> float:
    """Predict the seconds from now to the end; what a stage does once counts in full while the stage is under way."""
    seconds = costs.eval_once_s + lengths.n_prompts * costs.prompt_s
    seconds += costs.ppo_once_s + lengths.ppo_steps * costs.ppo_step_s
    if stage == "ppo":
        return seconds - n_done * costs.ppo_step_s
    return seconds + costs.rw_once_s + (lengths.rw_steps - n_done) * costs.rw_step_s


def choose_prompts(lengths: Lengths, *, n_done: int, once_s: float, prompt_s: float, limit_s: float) -> Choice:
    """Choose how many prompts the evaluation ends with: all if they fit, else whole batches, `LEAST_PROMPTS` at least.

    Args:
        lengths: those chosen before; `n_prompts` never grows.
        n_done: prompts that are evaluated.
        once_s: seconds from now to the first prompt, or to the one after `n_done`.
        prompt_s: seconds of each prompt.
        limit_s: seconds from now in which all should be done.
    """
    n_fit = n_done + math.floor(max(0.0, limit_s - once_s) / prompt_s)
    whole = n_fit - n_fit % PROMPTS_AT_A_TIME
    n = lengths.n_prompts if n_fit >= lengths.n_prompts else min(lengths.n_prompts, max(whole, LEAST_PROMPTS, n_done))
    left_s = once_s + (n - n_done) * prompt_s
    return Choice(replace(lengths, n_prompts=n), begins_anew=False, left_s=left_s, fits=left_s <= limit_s)


def is_late(end_s: float, told_s: float, started_s: float) -> bool:
    """Return True if the predicted end is so far behind the one that was told that the user should know."""
    return end_s - told_s > max(LATE_S, LATE_SHARE * (told_s - started_s))


def explain_late(choice: Choice, planned: Lengths, *, limit_min: float) -> str:
    """Say what is done about a late end.

    Args:
        planned: lengths of PPO and evaluation that were told before.
    """
    lengths = choice.lengths
    less = []
    if lengths.ppo_steps < planned.ppo_steps:
        less.append(f"{lengths.ppo_steps} PPO steps instead of {planned.ppo_steps}")
    if lengths.n_prompts < planned.n_prompts:
        less.append(f"{lengths.n_prompts} held-out prompts instead of {planned.n_prompts}")
    if not choice.fits:
        return f"{' and '.join(less) or 'it goes on'}, as nothing ends sooner"
    within = f"within {limit_min:g} minutes"
    return f"{' and '.join(less)}, to end {within}" if less else f"it goes on, as that is {within}"


def explain(choice: Choice, full: Lengths, *, stage: Stage, step_s: float, limit_min: float) -> list[str]:
    """Say what was measured and chosen.

    Args:
        full: lengths of a quickstart that has all the time it needs.
        stage: stage whose steps were measured.
        step_s: seconds that one of them takes.
        limit_min: minutes that the whole quickstart may take.
    """
    lengths, step = choice.lengths, "reward-model step" if stage == "rw" else "PPO step"
    sizes = f"{lengths.rw_steps} reward-model steps and {lengths.ppo_steps} PPO steps"
    whole = f"{full.rw_steps} and {full.ppo_steps}"
    if lengths.n_prompts < full.n_prompts:
        sizes += f", evaluated on {lengths.n_prompts} prompts"
        whole += f" on {full.n_prompts}"
    if not choice.fits:
        told = f"{sizes}: it may take longer than {limit_min:g} minutes, but nothing ends sooner"
    elif lengths == full:
        told = f"{sizes}: nothing has to be left out to end within {limit_min:g} minutes"
    else:
        told = f"{sizes}, instead of {whole}, so that it ends within {limit_min:g} minutes"
    ppo_step_s = REFERENCE.ppo_step_s * slowness(stage, step_s)
    expected = f", and a PPO step should take about {ppo_step_s:.0f} s" if stage == "rw" else ""
    return [f"speed   a {step} takes {step_s:.1f} s on this machine now{expected}", f"length  {told}"]
