"""Checks of the training backends of a run's roles: supported settings, and installed packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from realrl.errors import ConfigError
from realrl.experiment.run_plan import RunPlan
from realrl.plan.backends import BACKENDS, TrainedRole, check_backend
from realrl.plan.fused_calls import check_trainers
from realrl.plan.hooks import Offload


def check_backends(plan: RunPlan) -> None:
    """Refuse settings that a role's backend does not support.

    Raises:
        ConfigError: names the role, the rule and a remedy.
    """
    for name, role in plan.roles.items():
        backend = plan.config.models[name].backend
        if backend != "native" and not role.trainable:
            raise ConfigError(
                f"models.{name}.backend={backend} has no effect: role '{name}' is not trained",
                remedy="Leave it out.",
            )
        if backend != "native" and plan.config.cluster.shares_devices:
            raise ConfigError(
                f"cluster.shares_devices=true, but models.{name}.backend={backend} has collectives of its own, "
                "which need a device for each worker",
                remedy=f"Use models.{name}.backend=native.",
            )
    for trained in trained_roles(plan):
        check_backend(trained)
    if plan.fusion is not None:
        backends = {mfc.name: plan.config.models[mfc.role].backend for mfc in plan.mfcs}
        check_trainers(plan.fusion, backends)


def check_installed(plan: RunPlan, is_there: Callable[[str], bool] | None = None) -> None:
    """Refuse a backend whose package is missing.

    Args:
        is_there: returns True if a package can be imported; asks the interpreter by default.

    Raises:
        ConfigError: names the key and the command that installs it.
    """
    for name in plan.roles:
        check_package(f"models.{name}.backend", plan.config.models[name].backend, is_there or _is_there)


def check_package(key: str, backend: str, is_there: Callable[[str], bool]) -> None:
    """Refuse one backend whose package is missing; `key` is its configuration key."""
    rules = BACKENDS[backend]
    if rules.package and not is_there(rules.package):
        raise ConfigError(
            f"{key}={backend} needs the package {rules.package}, which is not installed",
            remedy=f"Install it with pip install 'realrl[{rules.extra}]', or use backend=native.",
        )


def needs_library_groups(plan: RunPlan) -> bool:
    """Return True if some role's backend wants process groups of its own, also of one rank."""
    return any(plan.config.models[name].backend != "native" for name in plan.roles)


def trained_roles(plan: RunPlan) -> Iterator[TrainedRole]:
    """Yield the trained roles, as `check_backend` needs them."""
    hooks = [hook for call in plan.hooks.values() for hook in (*call.before, *call.after)]
    for name, role in plan.roles.items():
        home = plan.home_of(name)
        if not role.trainable or home is None:
            continue
        section = plan.config.models[name]
        yield TrainedRole(
            name=name,
            backend=section.backend,
            zero_stage=section.optimizer.zero_stage,
            offload=section.optimizer.offload,
            precision=plan.config.precision,
            strategy=home.strategy,
            has_adapters=section.lora.rank > 0,
            is_offloaded=any(isinstance(hook, Offload) and hook.role == name for hook in hooks),
        )


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
