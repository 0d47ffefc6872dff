"""Durations and lengths of a run on modelled machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from realrl.config.schema import RunConfig
from realrl.data.kinds import DatasetKind
from realrl.errors import ConfigError
from realrl.experiment.models import role_configs
from realrl.experiment.run_plan import RunPlan
from realrl.experiment.states import call_states, longest_rows, role_states
from realrl.plan.memory.formulas.local import ON_CUDA, Kernels
from realrl.plan.memory.plan import CallState, RoleState
from realrl.profiler.hardware_files import lengths_of, named_hardware
from realrl.sim.costs.calls import CostModel
from realrl.sim.durations import SampleSizes
from realrl.sim.hardware import Hardware

DEFAULT_CPU, ONE_WORKER = "two_cores", "two_cores_one_worker"

KernelsOf = Callable[[Mapping[str, RoleState], Sequence[CallState], str], Kernels]
"""``kernels_of(roles, calls, device)`` -> use of memory by the kernels of that kind of device."""

Draw = Callable[[str], SampleSizes]
"""Sample -> its tokens, those of responses to its prompt included."""


def default_kernels(roles: Mapping[str, RoleState], calls: Sequence[CallState], device: str) -> Kernels:
    """Return the kernels of CUDA."""
    return ON_CUDA


def hardware_for(config: RunConfig, option: str | None = None) -> Hardware:
    """Return the machine of `cluster.hardware`; where none is named for a plan on CPUs, `DEFAULT_CPU` or `ONE_WORKER`.

    Args:
        config: its device is settled.
        option: value of --hardware, which wins.

    Raises:
        ConfigError: there is no such machine, its devices are of another kind, or none is named for a plan on
            accelerators.
    """
    device, reference = config.cluster.device, option or config.cluster.hardware
    if not reference and device != "cpu":
        raise ConfigError(
            f"cluster.device={device}: the machine is not known", remedy="Name one, such as --hardware h100."
        )
    key = "--hardware" if option else "cluster.hardware"
    reference = reference or (DEFAULT_CPU if config.cluster.n_devices_per_node > 1 else ONE_WORKER)
    machine = named_hardware(reference, option=key)
    check_kind(machine, device, source=f"{key} {reference}")
    return machine


def check_kind(machine: Hardware, device: str, *, source: str) -> None:
    """Refuse a machine with devices of another kind than those of a plan.

    Args:
        device: `cluster.device`, settled.
        source: the key or option that names the machine, for the message.

    Raises:
        ConfigError: names both kinds.
    """
    if machine.device.kind != device:
        raise ConfigError(
            f"{source} has devices of kind {machine.device.kind}, and the plan is for cluster.device={device}",
            remedy=f"Set cluster.device={machine.device.kind}.",
        )


def described(config: RunConfig, machine: Hardware) -> str:
    """Return what to tell of a machine: its name, and where its values are of another number of workers on a CPU."""
    n, profile = config.cluster.n_devices_per_node, machine.profile
    if profile is None or profile.n_workers == n or machine.device.kind != "cpu":
        return f"on {machine.name}"
    return f"on {machine.name}, measured with {profile.n_workers} at a time, and a node of the plan has {n}"


def draw_of(plan: RunPlan, wanted: str | None) -> tuple[Draw, tuple[str, ...]]:
    """Return the lengths of samples, and assumptions that the user did not choose.

    Args:
        wanted: as for `lengths_of`; None for the longest that the configuration allows.

    Raises:
        ConfigError: they are no lengths, or exceed the limits.
    """
    config = plan.config
    n_prompt = config.dataset.max_prompt_tokens
    n_new = config.generation.max_new_tokens if plan.generating_roles else config.dataset.max_answer_tokens
    longest_allowed = f"prompt=fixed:{n_prompt} response=fixed:{n_new}"
    lengths = lengths_of(longest_allowed if wanted is None else wanted, config, max_new_tokens=n_new)
    n_responses = config.generation.n_responses if plan.generating_roles else 0
    n_given = 1 if plan.experiment.dataset is DatasetKind.PROMPT_ANSWER else 2

    def draw(sample_id: str) -> SampleSizes:
        prompt = lengths.prompt(sample_id)
        responses = tuple(lengths.response(sample_id, i) for i in range(n_responses or n_given))
        if n_responses:
            return SampleSizes((prompt,) * n_responses, responses)
        return SampleSizes(tuple(prompt + response for response in responses))

    if wanted is not None:
        return draw, ()
    sizes = f"prompts of {n_prompt} and responses of {n_new} tokens"
    return draw, (f"{sizes}, the longest that the configuration allows (--lengths gives others)",)


def costs_of(plan: RunPlan, machine: Hardware, kernels: KernelsOf) -> CostModel:
    """Return the durations of a plan on a machine."""
    calls = call_states(plan, longest_rows(plan.config, plan.experiment.dataset))
    roles = role_states(plan, role_configs(plan))
    found = kernels(roles, calls, machine.device.kind)
    return CostModel(roles, machine, generation=plan.config.generation, kernels=found)
