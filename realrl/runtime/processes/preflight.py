"""Checks before a process starts: model files, tokenizers, the dataset, a checkpoint to resume from.

Built-in models and tasks need no check and none of the heavy imports, unless a checkpoint must fit them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from realrl.config.schema import BUILT_IN
from realrl.data.tiny import VOCAB_SIZE
from realrl.data.tokenizer import load_tokenizer
from realrl.errors import AssetError, ConfigError
from realrl.experiment.backends import check_installed
from realrl.experiment.evaluation import held_out_data
from realrl.experiment.models import role_configs
from realrl.experiment.planning import check_models_fit
from realrl.experiment.run_plan import RunPlan
from realrl.runtime.checkpoints.compatibility import check_resume, check_samples
from realrl.runtime.checkpoints.resume import find_beginning
from realrl.runtime.checkpoints.store import Resume, load_manifest
from realrl.shape import tiny_config

if TYPE_CHECKING:
    from realrl.data.datasets import Dataset


def check_inputs(plan: RunPlan) -> Resume:
    """Read the checkpoint to resume from, every model's headers, every tokenizer, and the whole dataset.

    Returns:
        The starting point of the run.

    Raises:
        AssetError: a file of a model or checkpoint is missing or torn, a tokenizer is unusable, a model lacks tokens.
        DataError: a row of the dataset is unusable, none is left, or too few for one step.
        ConfigError: the checkpoint has no step left to do, or was made with another order of the data; a training
            backend is not installed, or does not support a setting.
        AllocationError: a strategy does not fit a model.
    """
    config = plan.config
    found, master_plan = find_beginning(plan)
    for name, role in plan.roles.items():
        path = config.models[name].path
        if path != BUILT_IN and role.head != "none":
            from realrl.model.files.hf import check_model

            with _naming(f"models.{name}.path"):
                check_model(path, head=role.head, makes_head=role.trainable)
    check_models_fit(plan)
    check_installed(plan)
    if found.folder is not None:
        manifest = load_manifest(found.folder)
        check_resume(plan, found.folder, manifest)
        outputs = {mfc.name: mfc.output_keys for mfc in plan.mfcs}
        check_samples(found.folder, manifest.files, manifest.in_flight, outputs)
    sources = [] if config.eval.only else [config.dataset]
    is_evaluated = config.eval.only or plan.evaluation is not None
    held_out = [held_out_data(config)] if is_evaluated else []
    paths = [source.path for source in (*sources, *held_out)]
    is_built_in = all(path == BUILT_IN for path in (*paths, *(config.models[name].path for name in plan.roles)))
    is_short = (
        config.generation.max_new_tokens <= tiny_config(VOCAB_SIZE).max_positions // 2 or not plan.generating_roles
    )
    if is_built_in and is_short and found.folder is None:
        return found
    from realrl.data.datasets import load_dataset

    for path, name in {config.models[name].path: name for name in reversed(list(plan.roles))}.items():
        with _naming(f"models.{name}.path"):
            load_tokenizer(path)
    tokenizer = load_tokenizer(config.models[plan.dataset_role].path)
    for source, is_held_out in [*((source, False) for source in sources), *((source, True) for source in held_out)]:
        dataset = load_dataset(source, plan.experiment.dataset, tokenizer, is_held_out=is_held_out)
        check_vocabularies(plan, dataset, n_tokens=len(tokenizer))
        check_lengths(plan, dataset)
        if not is_held_out:
            main = master_plan.main
            main.last_step(main.cursor(dataset.row_ids, dataset.digest))
    return found


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Put the configuration key of a file before the message of an `AssetError`."""
    try:
        yield
    except AssetError as error:
        raise AssetError(f"{key}: {error.message}", remedy=error.remedy) from error


def check_lengths(plan: RunPlan, dataset: Dataset) -> None:
    """Refuse prompts that, with their responses or answers, exceed positions which a model cannot do without.

    Raises:
        ConfigError: names the role.
    """
    generating = plan.generating_roles
    new = plan.config.generation.max_new_tokens if generating else 0
    longest = max(dataset.prompt_lens) + new if new else max(map(max, dataset.seqlens))
    for name, model in role_configs(plan).items():
        if longest > model.max_positions and (name in generating or model.learned_positions):
            what = f"a prompt of {longest - new} tokens and {new} new ones" if new else "a prompt with its answer"
            raise ConfigError(
                f"{what} make {longest} tokens, and the model of role '{name}' has {model.max_positions} positions",
                remedy="Lower dataset.max_prompt_tokens or "
                + ("generation.max_new_tokens." if new else "dataset.max_answer_tokens."),
            )


def check_vocabularies(plan: RunPlan, dataset: Dataset, *, n_tokens: int) -> None:
    """Refuse a role whose vocabulary lacks tokens that it may get: the dataset's, and those that its role generates.

    The dataset's role itself may know fewer tokens than its tokenizer, which often has added tokens that no text
    contains.

    Raises:
        AssetError: a role knows too few tokens.
    """
    from realrl.model.files.config_file import read_config

    reader = plan.dataset_role
    for name, role in plan.roles.items():
        path = plan.config.models[name].path
        if role.head == "none":
            continue
        n_known = VOCAB_SIZE if path == BUILT_IN else read_config(path).vocab_size
        n_needed = dataset.max_token_id + 1 if name == reader else n_tokens
        if n_known < n_needed:
            raise AssetError(
                f"models.{name}.path={path} knows {n_known} tokens, but the tokenizer of '{reader}' gives ids "
                f"up to {n_needed - 1}",
                remedy=f"All roles must have the vocabulary of '{reader}': set models.{name}.path to such a model.",
            )
