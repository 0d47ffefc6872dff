"""Durations of a simulated run on modelled machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realrl.errors import ConfigError

if TYPE_CHECKING:
    from realrl.experiment.run_plan import RunPlan
    from realrl.sim.durations import Durations, SampleSizes
    from realrl.sim.lengths import Lengths

DEFAULT_CPU, ONE_WORKER = "two_cores", "two_cores_one_worker"


@dataclass(frozen=True)
class Modelled:
    """Durations of a plan on modelled machines, and the lengths of its samples.

    Attributes:
        draw: sample id -> its tokens.
        notes: assumptions that the user did not choose.
        alone: see `realrl.sim.hardware.Device`.
    """

    durations: Durations
    draw: Callable[[str], SampleSizes]
    notes: tuple[str, ...]
    alone: float


def model_run(plan: RunPlan, hardware: str | None, lengths: str | None) -> Modelled:
    """Return a plan's durations on modelled machines.

    Raises:
        ConfigError: machine or lengths cannot be used, or no machine is given for a plan on accelerators.
    """
    from realrl.doctor.memory import machine_kernels
    from realrl.experiment.models import role_configs
    from realrl.experiment.states import call_states, role_states
    from realrl.plan.memory.load import RowLengths
    from realrl.profiler.hardware_files import lengths_of, named_hardware
    from realrl.sim.costs.calls import CostModel

    device = plan.config.cluster.device
    if hardware is None and device != "cpu":
        raise ConfigError(
            f"cluster.device={device}: the machine is not known", remedy="Name one, such as --hardware h100."
        )
    n_workers = plan.config.cluster.n_devices_per_node
    hardware = hardware or (DEFAULT_CPU if n_workers > 1 else ONE_WORKER)
    machine = named_hardware(hardware)
    if machine.device.kind != device:
        raise ConfigError(
            f"--hardware {hardware} has devices of kind {machine.device.kind}, and the plan is for "
            f"cluster.device={device}",
            remedy=f"Set cluster.device={machine.device.kind}.",
        )
    n_prompt = plan.config.dataset.max_prompt_tokens
    n_new = plan.config.generation.max_new_tokens if plan.generating_roles else plan.config.dataset.max_answer_tokens
    longest_allowed = f"prompt=fixed:{n_prompt} response=fixed:{n_new}"
    found = lengths_of(longest_allowed if lengths is None else lengths, plan.config, max_new_tokens=n_new)
    calls = call_states(plan, RowLengths([n_prompt], [2 * (n_prompt + n_new)], [n_prompt + n_new]))
    roles = role_states(plan, role_configs(plan))
    durations = CostModel(
        roles,
        machine,
        generation=plan.config.generation,
        kernels=machine_kernels(roles, calls, device),
    )
    notes = [f"on {machine.name}"]
    if machine.profile is not None and machine.profile.n_workers != n_workers and device == "cpu":
        notes[0] += f", measured with {machine.profile.n_workers} at a time, and a node of the plan has {n_workers}"
    if lengths is None:
        sizes = f"prompts of {n_prompt} and responses of {n_new} tokens"
        notes.append(f"{sizes}, the longest that the configuration allows (--lengths gives others)")
    return Modelled(durations, _draw(plan, found), tuple(notes), machine.device.alone)


def _draw(plan: RunPlan, lengths: Lengths) -> Callable[[str], SampleSizes]:
    """Return the tokens of a sample: responses to its prompt, or the sequences that the dataset holds."""
    from realrl.data.kinds import DatasetKind
    from realrl.sim.durations import SampleSizes

    n_responses = plan.config.generation.n_responses if plan.generating_roles else 0
    n_given = 1 if plan.experiment.dataset is DatasetKind.PROMPT_ANSWER else 2

    def draw(sample_id: str) -> SampleSizes:
        prompt = lengths.prompt(sample_id)
        responses = tuple(lengths.response(sample_id, i) for i in range(n_responses or n_given))
        if n_responses:
            return SampleSizes((prompt,) * n_responses, responses)
        return SampleSizes(tuple(prompt + response for response in responses))

    return draw
