"""Inputs, this half: datasets, models, tokenizers, chat templates, checkpoints."""

from __future__ import annotations

from tests.fuzz.files import (
    checkpoints,
    json_datasets,
    model_configs,
    parquet_datasets,
    templates,
    tensor_files,
    tokenizers,
    whole,
)
from tests.fuzz.sweep import Kind, server, test_some, test_thousands

__all__ = ["server", "test_some", "test_thousands"]
WHOLE = whole
KINDS = {
    "JSON datasets": Kind(json_datasets(), 900),
    "parquet datasets": Kind(parquet_datasets(), 300),
    "model configurations": Kind(model_configs(), 1000),
    "tensor files": Kind(tensor_files(), 600),
    "tokenizers": Kind(tokenizers(), 400),
    "chat templates": Kind(templates(), 200),
    "checkpoints": Kind(checkpoints(), 600),
}
