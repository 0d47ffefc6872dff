"""The roles' share of a checkpoint: models in Hugging Face format, and the state that an exact continuation needs.

<role>/                                       model of a changed role; ranks of one replica write it together
state/<role>.safetensors                      version and interface state
state/<role>-optimizer-pp0-tp1.safetensors    optimizer state of one (pp, tp) coordinate of a trained role

A save has two parts. `copy_roles` copies the share to host memory, all ranks together, bucket by bucket. Then each rank
by itself writes its `RoleCopy`, while training goes on. A restoring rank reads the slices that its own layout needs
from the files of any other layout (see `realrl.plan.parameters.restore`).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from realrl.engine import device as devices
from realrl.engine.parameters.gather_parameters import WriteModel
from realrl.errors import AssetError
from realrl.experiment.run_plan import RunPlan
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.files.companions import write_companions
from realrl.plan.memory.buffers import SAVE_STAGE
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.restore import Coordinate, SavedSlice, coordinates, plan_restore
from realrl.runtime.checkpoints.state_file import StateFile, load_state, save_state
from realrl.runtime.checkpoints.store import Manifest
from realrl.runtime.worker.roles import HostedRole
from realrl.sched.messages import SavedRole
from realrl.shape import DecoderConfig

_PARAMETERS = "parameters"


def role_file(role: str) -> str:
    """Path inside a checkpoint of a role's version and interface state."""
    return f"state/{role}.safetensors"


def optimizer_file(role: str, coordinate: Coordinate) -> str:
    """Path inside a checkpoint of the optimizer state of one coordinate, which data-parallel ranks share."""
    return f"state/{role}-optimizer-pp{coordinate[0]}-tp{coordinate[1]}.safetensors"


# ---------------------------------------------------------------- saving


class HostCopies:
    """Copies of tensors in host memory; the next copy of the same name reuses the memory.

    So only the first checkpoint pays for new memory. It is pageable: copies from CUDA pass through a few pinned bytes,
    which are released by `end`.

    Args:
        stage: maker of what such copies pass through.
        needs_stage: True for a tensor that is not copied directly.
    """

    def __init__(
        self,
        stage: Callable[[], devices.Staging] = lambda: devices.Staging(SAVE_STAGE),
        needs_stage: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda,
    ) -> None:
        self.copied_bytes = 0
        self._make_stage = stage
        self._needs_stage = needs_stage
        self._stage: devices.Staging | None = None
        self._memory: dict[str, torch.Tensor] = {}
        self._nothing_changes = False

    def begin(self, *, nothing_changes: bool) -> None:
        """Begin the next checkpoint; with `nothing_changes`, tensors in host memory are not copied."""
        self.copied_bytes = 0
        self._nothing_changes = nothing_changes

    def end(self) -> None:
        """Release the pinned memory, after the last copy of a checkpoint."""
        if self._stage is not None:
            self._stage = None
            devices.release_pinned()

    def forget(self) -> None:
        """Free the copies, after they were written."""
        self._memory.clear()

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` as it is now, complete on return."""
        owns_memory = tensor.untyped_storage().nbytes() == tensor.nbytes  # a view would keep its whole bucket
        if self._nothing_changes and tensor.device.type == "cpu" and owns_memory:
            self._memory.pop(name, None)  # the copy of an earlier checkpoint
            return tensor.detach()
        known = self._memory.get(name)
        if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
            known = self._memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if self._needs_stage(tensor):
            self._stage = self._stage or self._make_stage()
            self._stage.copy(tensor, known)
        else:
            known.copy_(tensor.detach())
        self.copied_bytes += tensor.nbytes
        return known


@dataclass(frozen=True)
class RoleCopy:
    """One rank's share of one role's files, in host memory.

    Attributes:
        model: writes the share of the model's files; None if the rank writes none.
        tokenizer: written beside the model; None on all ranks but one.
        companions: other files beside the model, unless the tokenizer writes them.
        states: path inside the checkpoint -> nested state.
    """

    name: str
    model: WriteModel | None = None
    tokenizer: Any = None
    companions: Mapping[str, bytes] = field(default_factory=dict)
    states: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def write(self, folder: Path) -> list[Path]:
        """Write everything into a checkpoint's folder; returns the files of model and state.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        files = [] if self.model is None else self.model(folder / self.name)
        if self.tokenizer is not None:
            _save_tokenizer(self.tokenizer, folder / self.name)
            write_companions(self.companions, folder / self.name)
        for path, state in self.states.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            save_state(folder / path, state)
            files.append(folder / path)
        return files


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as err:  # the tokenizers library raises bare Exception for a disk that is full
        raise OSError(errno.EIO, str(err), str(folder / "tokenizer.json")) from err


def copy_roles(plan: RunPlan, roles: Mapping[str, HostedRole], rank: int, copies: HostCopies) -> list[RoleCopy]:
    """Copy this rank's share of all roles; every rank that hosts roles calls this, because some gather together."""
    first = {name: plan.role_ranks(name)[0] for name in roles}
    return [_copy_role(name, hosted, rank, copies, rank == first[name]) for name, hosted in roles.items()]


def _copy_role(name: str, hosted: HostedRole, rank: int, copies: HostCopies, is_first: bool) -> RoleCopy:
    engine, home = hosted.home_engine, hosted.home
    interfaces = {call: interface.state_dict() for call, interface in hosted.state_interfaces.items()}
    common = {"version": hosted.version, "interfaces": interfaces}
    if engine is None or home is None:
        is_speaker = home is None and any(interfaces.values()) and is_first
        return RoleCopy(name, states={role_file(name): common} if is_speaker else {})
    was_away = hosted.is_away
    if hosted.is_changed:  # the others are in no file
        hosted.wait_resident()
    pp_rank, dp_rank, tp_rank = home.strategy.coordinates(home.ranks.index(rank))

    def keep(part: str, tensor: torch.Tensor) -> torch.Tensor:
        return copies.copy(f"{name}/{part}", tensor) if dp_rank == 0 else tensor.new_empty(0)

    optimizer = engine.state_dict(lambda part, tensor: keep(f"optimizer/{part}", tensor))
    model = engine.copy_hf(keep) if hosted.is_changed else None
    if was_away and hosted.is_changed:
        hosted.offload()
    if dp_rank != 0:
        return RoleCopy(name)
    is_speaker = pp_rank == tp_rank == 0
    states: dict[str, Mapping[str, Any]] = {role_file(name): common} if is_speaker else {}
    if optimizer:
        states[optimizer_file(name, (pp_rank, tp_rank))] = optimizer
    tokenizer = hosted.tokenizer if is_speaker and hosted.is_changed else None
    return RoleCopy(name, model, tokenizer, hosted.companions, states)


# ---------------------------------------------------------------- restoring


def restore_roles(
    roles: Mapping[str, HostedRole], rank: int, folder: Path, manifest: Manifest, configs: Mapping[str, DecoderConfig]
) -> None:
    """Restore versions, interface states and optimizers of roles whose models are loaded already.

    Raises:
        AssetError: a state file is missing or damaged, or does not fit the run.
    """
    for name, hosted in roles.items():
        engine, home, path = hosted.home_engine, hosted.home, folder / role_file(name)
        if (engine is None and home is not None) or role_file(name) not in manifest.files:
            continue  # ranks outside the home get the state from the home; or nothing was saved
        state = load_state(path)
        try:
            hosted.version = state["version"]
            for call, interface in hosted.state_interfaces.items():
                interface.load_state_dict(state["interfaces"].get(call, {}))
            if engine is not None and home is not None and optimizer_file(name, (0, 0)) in manifest.files:
                path = folder / optimizer_file(name, (0, 0))
                pp_rank, _, tp_rank = home.strategy.coordinates(home.ranks.index(rank))
                reader = _OptimizerReader(folder, name, manifest.roles[name], configs[name])
                engine.load_state_dict(reader.read(home.strategy, (pp_rank, tp_rank)))
        except (KeyError, ValueError, RuntimeError) as err:
            raise AssetError(
                f"the state file {path} does not fit this run: {err}",
                remedy="Resume with the same experiment, models and precision.",
            ) from err


class _OptimizerReader:
    """Reads the optimizer state of a role for any layout."""

    def __init__(self, folder: Path, role: str, saved: SavedRole, config: DecoderConfig) -> None:
        self._folder = folder
        self._role = role
        self._saved = ParallelStrategy(saved.dp, saved.tp, saved.pp, vpp=saved.vpp)
        self._specs = parameter_specs(config)

    def read(self, strategy: ParallelStrategy, coordinate: Coordinate) -> dict[str, Any]:
        """The canonical state (see `realrl.engine.backends.base`) of one coordinate of another layout."""
        plan = plan_restore(self._specs, self._saved, strategy, coordinate)
        with ExitStack() as stack:
            needed = dict.fromkeys((coordinate, (0, 0), *plan.sources))
            files = {at: self._open(at, stack) for at in needed if at in coordinates(self._saved)}
            entries = {at: file.entries(_PARAMETERS) for at, file in files.items()}
            parameters = {
                name: _read_parameter(files, name, plan.shapes[name], pieces)
                for name, pieces in plan.pieces.items()
                if name in entries[pieces[0].source]  # frozen parameters have no state
            }
            common = next(iter(files.values())).without(_PARAMETERS)
        return {**common, _PARAMETERS: parameters}

    def _open(self, coordinate: Coordinate, stack: ExitStack) -> StateFile:
        return stack.enter_context(StateFile(self._folder / optimizer_file(self._role, coordinate)))


def _read_parameter(
    files: Mapping[Coordinate, StateFile], name: str, shape: tuple[int, ...], pieces: tuple[SavedSlice, ...]
) -> dict[str, Any]:
    """Optimizer state of one parameter, assembled from pieces."""
    state: dict[str, Any] = {}
    for key, value in files[pieces[0].source].entries(_PARAMETERS, name).items():
        if value is not True:  # not a tensor
            state[key] = value
            continue
        parts = [(piece, files[piece.source].read((_PARAMETERS, name, key), piece.read)) for piece in pieces]
        whole = state[key] = torch.empty(shape, dtype=parts[0][1].dtype)
        for piece, part in parts:
            whole[tuple(slice(start, stop) for start, stop in piece.write)] = part
    return state
