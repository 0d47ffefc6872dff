"""Checks of models, interfaces and the checkpoint to continue from, by files' headers alone."""

from __future__ import annotations

from realrl.config.schema import BUILT_IN
from realrl.doctor.findings import Finding, Status
from realrl.doctor.run_under_check import RunUnderCheck, naming
from realrl.experiment import registry
from realrl.experiment.models import notes_of_files
from realrl.experiment.planning import check_models_fit
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.runtime.checkpoints.compatibility import check_resume, check_samples
from realrl.runtime.checkpoints.store import load_manifest


def check_interfaces(run: RunUnderCheck) -> list[Finding]:
    """Check that interfaces which are not built in can be made for their calls, and have the methods."""
    own = [mfc for mfc in run.calls if mfc.interface.name not in registry.BUILT_IN]
    if own:
        from realrl.algo.resolve import check_interface

        for mfc in own:
            check_interface(mfc)
    names = ", ".join(dict.fromkeys(mfc.interface.name for mfc in own))
    return [Finding(Status.OK, f"of your own: {names}" if own else "all are built in")]


def check_models(run: RunUnderCheck) -> list[Finding]:
    """Check that every role's model can be built, that the strategies can cut it, and that its keys agree."""
    shown = ", ".join(f"{name} {_count(run, name) / 1e6:.1f}M" for name in run.models) or "none"
    check_models_fit(run.plan)
    remedy = "transformers 5 reads it so too. Keep one of the keys."
    doubts = [Finding(Status.WARNING, note, remedy) for note in notes_of_files(run.plan)]
    return [Finding(Status.OK, f"parameters: {shown}; they fit the strategies"), *doubts]


def check_weights(run: RunUnderCheck) -> list[Finding]:
    """Check that the files of every model are whole, as far as their headers tell."""
    from realrl.model.files.hf import check_model

    folders = []
    for name in run.models:
        role, path = run.plan.roles[name], run.config.models[name].path
        if path != BUILT_IN:
            with naming(f"models.{name}.path"):
                check_model(path, head=run.models[name].head, makes_head=role.trainable)
            folders.append(path)
    shown = ", ".join(dict.fromkeys(folders))
    return [Finding(Status.OK, f"whole: {shown}" if shown else "made on the spot")]


def check_checkpoint(run: RunUnderCheck) -> list[Finding]:
    """Check that the checkpoint to continue from is whole, and was made with this run's models and calls."""
    found, _ = run.beginning
    if found.folder is not None:
        manifest = load_manifest(found.folder)
        check_resume(run.plan, found.folder, manifest)
        outputs = {mfc.name: mfc.output_keys for mfc in run.plan.mfcs}
        check_samples(found.folder, manifest.files, manifest.in_flight, outputs)
    where = "the run starts at its first step" if found.folder is None else f"the run continues from {found.folder}"
    if found.notes:
        return [Finding(Status.WARNING, f"{where}: {'; '.join(found.notes)}")]
    return [Finding(Status.OK, where)]


def _count(run: RunUnderCheck, name: str) -> int:
    return sum(spec.n_elements for spec in parameter_specs(run.models[name]))
