"""The run that is examined: its plan, and inputs of several checks, each read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.config.schema import BUILT_IN, RunConfig
from realrl.data.kinds import DatasetKind
from realrl.data.tiny import LONGEST_ANSWER, LONGEST_PROMPT, N_ROWS, VOCAB_SIZE
from realrl.data.tokenizer import load_tokenizer
from realrl.errors import AssetError, UsageError
from realrl.experiment.evaluation import held_out_data
from realrl.experiment.models import DTYPES, role_config
from realrl.experiment.rewards import functions_of
from realrl.experiment.run_plan import RunPlan
from realrl.graph.mfc import MFCDef
from realrl.runtime.checkpoints.resume import find_beginning
from realrl.runtime.checkpoints.store import Resume
from realrl.runtime.processes.machine import Accelerators, accelerators
from realrl.sched.master.master_plan import MasterPlan
from realrl.shape import DecoderConfig, tiny_config

if TYPE_CHECKING:
    import torch

    from realrl.data.datasets import Dataset

Recompose = Callable[[Sequence[str]], RunConfig]
_TOY_REWARDS = "realrl.data.tiny:"  # start of the names of functions that judge any response


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Put the configuration key of a file before the message of an `AssetError`."""
    try:
        yield
    except AssetError as error:
        raise AssetError(f"{key}: {error.message}", remedy=error.remedy) from error


@dataclass(frozen=True)
class RunUnderCheck:
    """A run that has not started.

    Attributes:
        recompose: returns the configuration with further overrides, to see their effect; None: nothing else is tried.
        device_memory_bytes: memory of each device; None for that of this machine.
        machine_memory_bytes: the same, of the machines of the run, where they were asked.
        loads_models: True if checks may load a model.
        is_elsewhere: True if the run is meant for other machines: what this one has tells nothing then.
        holds_lock: True if this process has locked the run folder.
    """

    plan: RunPlan
    recompose: Recompose | None = None
    device_memory_bytes: int | None = None
    machine_memory_bytes: int | None = None
    loads_models: bool = True
    is_elsewhere: bool = False
    holds_lock: bool = False
    tokenizers: dict[str, Any] = field(default_factory=dict)

    @property
    def left_out(self) -> dict[str, str]:
        """Names of checks that only the machine itself could make -> the reason."""
        if not self.is_elsewhere:
            return {} if self.machine_memory_bytes is None else {"load": "the machines of the run do the work"}
        found = dict.fromkeys(("packages", "devices", "disk", "load", "port"), "only the machine itself could tell")
        folders = {self.config.models[name].path for name in self.plan.roles} - {BUILT_IN}
        bare = sorted(path for path in folders if not any(Path(path).glob("*.safetensors*")))
        if bare:
            found["weights"] = found["tokenizers"] = f"there is no model here, but its sizes: {', '.join(bare)}"
        return found

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @property
    def calls(self) -> tuple[MFCDef, ...]:
        """All calls, those that evaluate a training run included."""
        evaluation = self.plan.evaluation
        return self.plan.mfcs if evaluation is None else (*self.plan.mfcs, *evaluation.mfcs)

    @cached_property
    def found(self) -> Accelerators:
        """This machine's CUDA devices."""
        return accelerators()

    @cached_property
    def beginning(self) -> tuple[Resume, MasterPlan]:
        """The checkpoint to continue from, and the master's plan; raises `UsageError` as `find_beginning` does."""
        return find_beginning(self.plan)

    @property
    def is_built_in(self) -> bool:
        """True if models, rows and rewards are built in and fit together: there is nothing to read."""
        config, new = self.config, self.config.generation.max_new_tokens
        paths = {config.models[name].path for name in self.plan.roles} | {path for _, path, _ in self.sources}
        functions = [function for mfc in self.calls for function in functions_of(mfc.interface)]
        if paths != {BUILT_IN} or not all(function.startswith(_TOY_REWARDS) for function in functions):
            return False
        data, stops = config.dataset, config.generation.stop_ids
        is_short = new <= tiny_config(VOCAB_SIZE).max_positions // 2 or not self.plan.generating_roles
        is_whole = data.max_prompt_tokens >= LONGEST_PROMPT and data.max_answer_tokens >= LONGEST_ANSWER
        is_plain = not data.chat_template and all(stop < VOCAB_SIZE for stop in stops)
        if not (is_short and is_whole and is_plain and self.plan.samples_per_step <= N_ROWS):
            return False
        try:
            return self.beginning[0].folder is None
        except UsageError:  # told by the check of the checkpoint
            return False

    @cached_property
    def models(self) -> dict[str, DecoderConfig]:
        """Role -> its model, for roles that have one."""
        found = {}
        for name, role in self.plan.roles.items():
            with naming(f"models.{name}.path"):
                found[name] = role_config(self.config, name, role)
        return {name: model for name, model in found.items() if model is not None}

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of computation."""
        from realrl.model.dtypes import torch_dtype

        return torch_dtype(DTYPES[self.config.precision])

    @cached_property
    def device(self) -> torch.device:
        """The device of the first worker; raises `ConfigError` where there is none."""
        from realrl.engine.device import resolve_device

        return resolve_device(self.config.cluster.device)

    @property
    def planned_device(self) -> torch.device:
        """The device that the run is planned for; it need not be present."""
        import torch

        return torch.device("cuda") if self.config.cluster.device == "cuda" else self.device

    def tokenizer(self, path: str) -> Any:
        """Return the tokenizer of a model folder."""
        if path not in self.tokenizers:
            self.tokenizers[path] = load_tokenizer(path)
        return self.tokenizers[path]

    @cached_property
    def reading_tokenizer(self) -> Any:
        """The tokenizer that makes the dataset's tokens."""
        return self.tokenizer(self.config.models[self.plan.dataset_role].path)

    @property
    def sources(self) -> tuple[tuple[str, str, bool], ...]:
        """Key, path and "is held out" of the dataset's files, unless the run only evaluates, and of validation data."""
        config, found = self.config, []
        if not config.eval.only:
            found += [(key, path, False) for key, path in config.dataset.paths.items()]
        if config.eval.only or self.plan.evaluation is not None:
            found.append(("eval.path", held_out_data(config).path, True))
        return tuple(found)

    @cached_property
    def datasets(self) -> dict[str, Dataset]:
        """`dataset` and `eval`, as far as `sources` has them -> their rows."""
        from realrl.data.datasets import load_dataset

        found = {key.partition(".")[0]: is_held_out for key, _, is_held_out in self.sources}
        return {
            name: load_dataset(
                held_out_data(self.config) if is_held_out else self.config.dataset,
                self.kind,
                self.reading_tokenizer,
                is_held_out=is_held_out,
            )
            for name, is_held_out in found.items()
        }

    @property
    def dataset(self) -> Dataset:
        """The run's dataset, or its validation data if it only evaluates."""
        return next(iter(self.datasets.values()))

    @property
    def kind(self) -> DatasetKind:
        """Kind of the dataset."""
        return self.plan.experiment.dataset
