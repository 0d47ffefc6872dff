"""What can be refused before a process starts: model files, tokenizers, the dataset.

Built-in models and tasks need no check, and then none of the heavy imports.
"""

from __future__ import annotations

from realrl.runtime.run_plan import RunPlan

_BUILT_IN = "tiny"


def check_inputs(plan: RunPlan) -> None:
    """Read every model's headers, every tokenizer, and the whole dataset.

    Raises:
        AssetError: a model file is missing or truncated, or a tokenizer is unusable.
        DataError: a row of the dataset is unusable, or none is left.
    """
    config = plan.config
    for name, role in plan.roles.items():
        path = config.models[name].path
        if path != _BUILT_IN and role.head != "none":
            from realrl.model.hf import check_model

            check_model(path, head=role.head)
    paths = [config.dataset.path, *(config.models[name].path for name in plan.roles)]
    if any(path != _BUILT_IN for path in paths):
        from realrl.data.datasets import load_dataset
        from realrl.runtime.roles import role_tokenizer

        load_dataset(config.dataset, plan.experiment.dataset, role_tokenizer(plan))
