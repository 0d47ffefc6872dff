"""The checks that decide whether a run starts: one list for `realrl run`, its ``--dry-run`` and `realrl doctor`.

Invariants:
    - a run is refused if and only if one of these checks finds a problem;
    - no other check of the doctor finds one, except about the memory of devices that the user describes;
    - checks that read models, rows and rewards are left out only where everything is built in and fits
      (`RunUnderCheck.is_built_in`), so that they would find nothing.
"""

from __future__ import annotations

from realrl.doctor.data_checks import (
    check_chat_template,
    check_dataset,
    check_lengths,
    check_steps,
    check_stop_tokens,
    check_tokenizers,
    check_vocabulary,
)
from realrl.doctor.findings import Check, Finding, run_checks
from realrl.doctor.machine_checks import (
    check_devices,
    check_disk,
    check_files,
    check_packages,
    check_port,
    check_run_folder,
)
from realrl.doctor.model_checks import check_checkpoint, check_interfaces, check_models, check_weights
from realrl.doctor.reward_checks import check_judges, check_rewards
from realrl.doctor.run_under_check import RunUnderCheck

CHECKS = (
    Check("judges", check_judges),
    Check("files", check_files),
    Check("run folder", check_run_folder),
    Check("packages", check_packages),
    Check("devices", check_devices),
    Check("port", check_port),
    Check("interfaces", check_interfaces),
    Check("models", check_models, ("files",)),
    Check("disk", check_disk, ("models",)),
    Check("checkpoint", check_checkpoint, ("run folder", "models")),
    Check("weights", check_weights, ("models",), reads=True),
    Check("tokenizers", check_tokenizers, ("files",), reads=True),
    Check("stop tokens", check_stop_tokens, ("models", "tokenizers"), reads=True),
    Check("chat template", check_chat_template, ("tokenizers",), reads=True),
    Check("dataset", check_dataset, ("files", "tokenizers"), reads=True),
    Check("steps", check_steps, ("dataset", "checkpoint"), reads=True),
    Check("lengths", check_lengths, ("models", "dataset"), reads=True),
    Check("vocabularies", check_vocabulary, ("judges", "models", "dataset"), reads=True),
    Check("rewards", check_rewards, ("interfaces", "dataset"), reads=True),
)


def preflight(run: RunUnderCheck) -> tuple[Finding, ...]:
    """Return the findings of all checks that decide whether a run starts."""
    checks = [check for check in CHECKS if not (check.reads and run.is_built_in)]
    return tuple(run_checks(checks, run, run.left_out))
