"""Findings about interfaces of realrl's own are about what the user gave them."""

from __future__ import annotations

from pathlib import Path

import pytest

from realrl.checker.causes import PER_MICRO_BATCH, PER_RANK
from realrl.checker.compare import Difference, Kind
from realrl.checker.diagnose import Finding
from realrl.checker.places import Places
from realrl.checker.recording import Recording
from realrl.config.policy_options import PolicyOptions
from realrl.graph.mfc import InterfaceRef, InterfaceType, MFCDef

SOURCE = """
def sampler(model, prompts, ctx):
    pass

def advantage(rollout):
    rollout.metrics["gain/mean"] = 0.0

def loss(actions, options):
    return {"bad": 0.0}

def stays(batch, options):
    pass

def score(prompt, response):
    pass
"""
LINES = {line.split()[1].partition("(")[0]: n for n, line in enumerate(SOURCE.splitlines(), 1) if line[:3] == "def"}
LINES |= {"metric": LINES["advantage"] + 1, "statistic": LINES["loss"] + 1}


@pytest.mark.parametrize(
    ("call", "kind", "name", "variant", "places"),
    [
        ("gen", Kind.OUTPUT, "input_ids", "reversed", ["sampler"]),
        ("rew", Kind.OUTPUT, "rewards", "again", ["score"]),
        ("keep", Kind.OUTPUT, "rewards", "data-2", ["stays"]),
        ("train", Kind.LOSS, "loss", "micro-batches-2", ["loss"]),
        ("train", Kind.STATISTIC, "bad", "data-2", ["statistic"]),
        ("train", Kind.LOSS, "loss", "data-2", ["advantage", "loss"]),
        ("train", Kind.RANKS, "gain/mean", "data-2", ["metric"]),
        ("ref", Kind.OUTPUT, "logprobs", "data-2", []),
    ],
)
def test_the_piece_to_blame(tmp_path: Path, call: str, kind: Kind, name: str, variant: str, places: list[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    options = PolicyOptions(
        sampler=f"{file}:sampler", advantage=f"{file}:advantage", policy_loss=f"{file}:loss", filter=f"{file}:stays"
    )
    score = InterfaceRef("function_reward", {"function": f"{file}:score"})
    tokens = ("input_ids",)
    mfcs = [
        MFCDef("gen", "actor", InterfaceType.GENERATE, "ppo_actor", ("prompt_ids",), tokens),
        MFCDef("rew", "reward", InterfaceType.INFERENCE, score, tokens, ("rewards",)),
        MFCDef("ref", "ref", InterfaceType.INFERENCE, "ppo_actor", tokens, ("logprobs",)),
        MFCDef("keep", "reward", InterfaceType.INFERENCE, InterfaceRef("filter", {"name": "x"}), tokens, ("kept",)),
        MFCDef("train", "actor", InterfaceType.TRAIN_STEP, "ppo_actor", tokens),
    ]
    cause = PER_MICRO_BATCH if variant.startswith("micro") else PER_RANK
    finding = Finding(cause, call, 1, (name,), {variant: Difference(1, call, kind, name, 0.0, 1.0, 1.0)})
    found = Places(Recording({}), {mfc.name: mfc for mfc in mfcs}, options).of(finding)
    assert found == " and ".join(f"{file}:{LINES[place]}" for place in places)
