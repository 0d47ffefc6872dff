"""Small model folders and user files that break in one chosen way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from realrl.data.tiny import tiny_tokenizer
from realrl.model.files.hf import save_model
from realrl.model.init import random_model
from realrl.shape import HeadKind, tiny_config

MISBEHAVING = '''
"""Generate, judge, learn; the judge and the learner do what the variable MISBEHAVE says."""

import os

import torch

from realrl import DatasetKind, Experiment, InterfaceType, KeySchema, MFCDef, ModelInterface, Per, Role


class Judge(ModelInterface):
    def inference(self, model, batch, ctx):
        how = os.environ.get("MISBEHAVE")
        rewards = torch.zeros(len(batch.ids))
        if how == "raise" and ctx.step == 2:
            raise RuntimeError("the judge is out")
        if how == "die":
            os._exit(0)
        if how == "none":
            return None
        if how == "nan":
            rewards[2] = float("nan")
        if how == "length":
            rewards = rewards[:-1]
        key = "reward" if how == "key" else "rewards"
        output = batch.derive("input_ids", {key: (KeySchema("float32", Per.SEQUENCE), rewards)})
        return output.select(batch.ids[1:], output.keys) if how == "sample" else output


class Learner(ModelInterface):
    def train_step(self, model, batch, ctx):
        return {"loss": float("nan") if os.environ.get("MISBEHAVE") == "metric" else 0.0}


def mfcs(config):
    n = config.n_seqs
    return [
        MFCDef("gen", "actor", InterfaceType.GENERATE, "ppo_actor", ("prompt_ids",), ("input_ids",), n_seqs=n),
        MFCDef("judge", "critic", InterfaceType.INFERENCE, "misbehaving:Judge", ("input_ids",), ("rewards",), n_seqs=n),
        MFCDef("learn", "actor", InterfaceType.TRAIN_STEP, "misbehaving:Learner", ("input_ids", "rewards"), n_seqs=n),
    ]


EXPERIMENT = Experiment(
    name="misbehaving",
    description="one call that does not do what it should",
    roles={"actor": Role(trainable=True), "critic": Role(trainable=False, head="none")},
    dataset=DatasetKind.PROMPT,
    mfcs=mfcs,
)
'''


def make_model_folder(folder: Path, head: HeadKind = "lm") -> Path:
    """Make a Hugging Face folder of the built-in random model with its tokenizer."""
    tokenizer = tiny_tokenizer()
    config = tiny_config(len(tokenizer), head=head)
    save_model(random_model(config, 1, device=torch.device("cpu")), folder)
    tokenizer.save_pretrained(folder)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    """Change some keys of a JSON file; None removes one."""
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def write_rows(file: Path, rows: list[Mapping[str, Any]]) -> Path:
    """Write JSON Lines."""
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return file
