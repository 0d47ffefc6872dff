"""Checks that a checkpoint fits a run: its models, and its rows of later steps. Imports torch for models only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from realrl.config.schema import BUILT_IN
from realrl.errors import AssetError
from realrl.experiment.run_plan import RunPlan
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.restore import model_digest
from realrl.runtime.checkpoints.state_header import names_in
from realrl.runtime.checkpoints.store import Manifest, is_sample_file
from realrl.sched.messages import SavedRole
from realrl.sched.samples.in_flight import InFlight

if TYPE_CHECKING:
    from realrl.shape import DecoderConfig


def saved_roles(plan: RunPlan, rank: int) -> dict[str, SavedRole]:
    """Describe, for the manifest, the roles in whose home this rank comes first."""
    from realrl.experiment.models import role_configs

    found = {}
    for name, config in role_configs(plan).items():
        home = plan.home_of(name)
        if home is not None and rank == home.ranks[0]:
            s = home.strategy
            digest, given = model_digest(parameter_specs(config)), _given(plan, name, config)
            found[name] = SavedRole(s.dp, s.tp, s.pp, digest, given, s.vpp)
    return found


def _given(plan: RunPlan, name: str, config: DecoderConfig) -> str:
    """Digest of a role's weights outside of the checkpoint; random ones follow from the seed."""
    if name in plan.changed_roles and config.lora is None:
        return ""
    from realrl.model.files.hf import weights_digest

    path = plan.config.models[name].path
    weights = path if path == BUILT_IN else weights_digest(path)
    return weights if config.lora is None else f"{weights} alpha={config.lora.alpha}"


def check_resume(plan: RunPlan, folder: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint whose models differ from this run's.

    Raises:
        AssetError: names the role and the manifest.
    """
    from realrl.experiment.models import role_configs

    for name, config in role_configs(plan).items():
        saved = manifest.roles.get(name)
        if saved is None and name not in plan.changed_roles:
            continue
        if saved is None:
            what = "has no role"
        elif saved.model != model_digest(parameter_specs(config)):
            what = "was written with another model of role"
        elif saved.given != _given(plan, name, config):
            what = "was written with other weights, or adapters of another alpha, of role"
        else:
            continue
        raise AssetError(
            f"{folder / 'state' / 'manifest.json'}: the checkpoint {what} '{name}'",
            remedy="Resume with the models and adapters of the run that wrote it.",
        )


def check_samples(
    folder: Path, files: Iterable[str], in_flight: InFlight, outputs: Mapping[str, Sequence[str]]
) -> None:
    """Refuse a checkpoint whose rows of later steps lack keys that this run's calls produce.

    Args:
        outputs: call -> keys that it produces.

    Raises:
        AssetError: a file is damaged, or samples of a finished call lack a key.
    """
    known: set[str] = set()
    for name in filter(is_sample_file, files):
        known |= names_in(folder / name)
    for record in in_flight.calls:
        missing = sorted(set(outputs.get(record.call, ())) - known)
        if missing and not in_flight.dropped.keys() >= set(record.ids):
            raise AssetError(
                f"{folder} holds samples of step {record.step} without '{missing[0]}', which '{record.call}' produces",
                remedy="Resume with the max_staleness of the run that wrote it.",
            )
