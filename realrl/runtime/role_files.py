"""The roles' share of a checkpoint: models in Hugging Face format, and what an exact continuation needs beside them.

<role>/                            every role that something changes; all ranks of one replica write it together
state/<role>.safetensors           optimizer and interfaces; of a sharded role one file a coordinate:
state/<role>-pp0-tp1.safetensors
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from realrl.errors import AssetError
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.runtime.roles import HostedRole
from realrl.runtime.run_plan import RunPlan
from realrl.runtime.state_file import load_state, save_state


def state_file(role: str, strategy: ParallelStrategy, mesh_rank: int) -> str:
    """Path inside a checkpoint of the state of one coordinate; data-parallel ranks have the same."""
    pp_rank, _, tp_rank = strategy.coordinates(mesh_rank)
    suffix = "" if strategy.pp == strategy.tp == 1 else f"-pp{pp_rank}-tp{tp_rank}"
    return f"state/{role}{suffix}.safetensors"


def save_roles(roles: Mapping[str, HostedRole], rank: int, folder: Path) -> None:
    """Write this rank's part of the roles whose home it is in, if it is of the first replica there.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    for name, hosted in roles.items():
        engine, home = hosted.home_engine, hosted.home
        if engine is None or home is None:
            continue
        mesh_rank = home.ranks.index(rank)
        if home.strategy.coordinates(mesh_rank)[1] != 0:
            continue
        hosted.wait_resident()
        if hosted.is_changed:
            engine.save_hf(folder / name)
            if mesh_rank == 0:
                hosted.tokenizer.save_pretrained(folder / name)
        (folder / "state").mkdir(parents=True, exist_ok=True)
        save_state(
            folder / state_file(name, home.strategy, mesh_rank),
            {
                "version": hosted.version,
                "engine": engine.state_dict(),
                "interfaces": {call: interface.state_dict() for call, interface in hosted.state_interfaces.items()},
            },
        )


def restore_roles(roles: Mapping[str, HostedRole], rank: int, folder: Path) -> None:
    """Continue where `save_roles` was called, with the models that it wrote, on ranks that are in some home.

    Raises:
        AssetError: a state file is missing or damaged, or does not fit the run.
    """
    for name, hosted in roles.items():
        engine, home = hosted.home_engine, hosted.home
        if engine is None or home is None:
            continue
        path = folder / state_file(name, home.strategy, home.ranks.index(rank))
        state = load_state(path)
        try:
            hosted.version = state["version"]
            engine.load_state_dict(state["engine"])
            for call, interface in hosted.state_interfaces.items():
                interface.load_state_dict(state["interfaces"].get(call, {}))
        except (KeyError, ValueError, RuntimeError) as err:
            raise AssetError(
                f"the state file {path} does not fit this run: {err}",
                remedy="Resume with the same experiment, models and precision.",
            ) from err


def check_resume(plan: RunPlan, folder: Path) -> None:
    """Refuse a checkpoint whose state was written in other layouts than this run's.

    Raises:
        AssetError: names the role, its strategy and the file that is not there.
    """
    for name in plan.roles:
        home = plan.home_of(name)
        if home is None:
            continue
        for mesh_rank in range(home.mesh.n_devices):
            path = folder / state_file(name, home.strategy, mesh_rank)
            if not path.is_file():
                raise AssetError(
                    f"checkpoint {folder} has no {path.relative_to(folder)}: "
                    f"role '{name}' was not saved in the layout tp={home.strategy.tp}, pp={home.strategy.pp}",
                    remedy="Resume with the allocation of the run that wrote it, or start anew from its models: "
                    f"models.{name}.path={folder / name}.",
                )
