"""Machines and lengths of a simulation: read from files, names and texts that a user gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.errors import ConfigError, did_you_mean
from realrl.files import read_input

if TYPE_CHECKING:
    from realrl.experiment.run_plan import RunPlan
    from realrl.sim.durations import Durations, SampleSizes
    from realrl.sim.hardware import Hardware
    from realrl.sim.lengths import Lengths

DEFAULT_CPU = "two_cores"
_FOLDER = "hardware"  # among the groups of YAML files
_MAX_YAML, _MAX_LENGTHS = 100_000, 1 << 30  # bytes


@dataclass(frozen=True)
class Modelled:
    """Durations of a plan on modelled machines, and the lengths of its samples.

    Attributes:
        draw: sample id -> its tokens.
        notes: assumptions that the user did not choose.
    """

    durations: Durations
    draw: Callable[[str], SampleSizes]
    notes: tuple[str, ...]


def read_hardware(wanted: str) -> Hardware:
    """Read a machine by its name among ``configs/hardware``, or from a file.

    Raises:
        ConfigError: there is no such machine or file, or it holds something else.
    """
    import yaml  # type: ignore[import-untyped]

    from realrl.experiment.discovery import config_dir
    from realrl.sim.hardware import hardware_from

    folder = config_dir() / _FOLDER
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    is_name = not wanted.endswith((".yaml", ".yml")) and "/" not in wanted
    if is_name and wanted not in known:
        raise ConfigError(
            f"--hardware {wanted}: there is no such machine." + did_you_mean(wanted, known),
            remedy=f"Choose from {', '.join(known)}, or give a YAML file.",
        )
    path = folder / f"{wanted}.yaml" if is_name else Path(wanted)
    source = f"--hardware {wanted}"
    try:
        content = yaml.safe_load(_read(path, source, _MAX_YAML))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: is no YAML: {' '.join(str(error).split())[:200]}") from error
    return hardware_from(content, source=source)


def read_lengths(wanted: str | None, plan: RunPlan) -> Lengths:
    """Read lengths from a text with distributions, or from recorded ones; None: the longest that the run allows.

    Raises:
        ConfigError: the text or the file is not understood, or lengths exceed the run's limits.
    """
    from realrl.sim.lengths import lengths_from, recorded_lengths

    config = plan.config
    limits = {
        "max_prompt_tokens": config.dataset.max_prompt_tokens,
        "max_new_tokens": config.generation.max_new_tokens
        if plan.generating_roles
        else config.dataset.max_answer_tokens,
    }
    longest = {"prompt": f"fixed:{limits['max_prompt_tokens']}", "response": f"fixed:{limits['max_new_tokens']}"}
    source, given = f"--lengths {wanted}", dict[str, object](longest)
    if wanted is not None and "=" in wanted and not Path(wanted).exists():
        return lengths_from(wanted, source=source, seed=config.seed, **limits)
    if wanted is not None:
        text = _read(Path(wanted), source, _MAX_LENGTHS).decode(errors="replace")
        given |= recorded_lengths(text.splitlines(), source=source)
    return lengths_from(given, source=source, seed=config.seed, **limits)


def model_run(plan: RunPlan, hardware: str | None, lengths: str | None) -> Modelled:
    """Return a plan's durations on modelled machines.

    Raises:
        ConfigError: machine or lengths cannot be used, or no machine is given for a plan on accelerators.
    """
    from realrl.doctor.memory import machine_kernels
    from realrl.experiment.models import role_configs
    from realrl.experiment.states import call_states, role_states
    from realrl.plan.memory.load import RowLengths
    from realrl.sim.costs.calls import CostModel

    device = plan.config.cluster.device
    if hardware is None and device != "cpu":
        raise ConfigError(
            f"cluster.device={device}: the machine is not known", remedy="Name one, such as --hardware h100."
        )
    machine = read_hardware(hardware or DEFAULT_CPU)
    if machine.device.kind != device:
        raise ConfigError(
            f"--hardware {hardware or DEFAULT_CPU} has devices of kind {machine.device.kind}, and the plan is for "
            f"cluster.device={device}",
            remedy=f"Set cluster.device={machine.device.kind}.",
        )
    found = read_lengths(lengths, plan)
    longest = found.max_prompt_tokens + found.max_new_tokens
    calls = call_states(plan, RowLengths([found.max_prompt_tokens], [2 * longest], [longest]))
    roles = role_states(plan, role_configs(plan))
    durations = CostModel(
        roles,
        machine,
        generation=plan.config.generation,
        kernels=machine_kernels(roles, calls, device),
    )
    notes = [f"on {machine.name}"]
    if lengths is None:
        sizes = f"prompts of {found.max_prompt_tokens} and responses of {found.max_new_tokens} tokens"
        notes.append(f"{sizes}, the longest that the configuration allows (--lengths gives others)")
    return Modelled(durations, _draw(plan, found), tuple(notes))


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


def _read(path: Path, source: str, most_bytes: int) -> Any:
    try:
        content = read_input(path, most_bytes=most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from error
    if len(content) > most_bytes:
        raise ConfigError(f"{source}: has more than {most_bytes:,} bytes", remedy="Give a smaller file.")
    return content
