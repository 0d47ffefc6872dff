from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from realrl.config.policy_options import (
    DistillOptions,
    MovingReferenceOptions,
    PolicyOptions,
    PPOOptions,
    SafeRLHFOptions,
)
from realrl.errors import ConfigError
from realrl.experiment import pieces
from realrl.experiment.pieces import (
    BUILT_IN,
    check_options_are_read,
    chosen_pieces,
    find_piece,
    piece_names,
    register_piece,
    training_keys,
)


@pytest.mark.parametrize("piece", BUILT_IN, ids=lambda piece: f"{piece.kind}-{piece.name}")
def test_every_built_in_piece_exists_and_reads_options_that_exist(piece: pieces.Piece) -> None:
    assert callable(piece.load())
    assert piece.load().__doc__
    some = {
        name for options in (SafeRLHFOptions, MovingReferenceOptions, DistillOptions) for name in options.model_fields
    }
    assert set(piece.options) | set(piece.reads_if) <= some


def test_keys_follow_from_the_chosen_pieces_and_their_options() -> None:
    assert training_keys(PolicyOptions()) == ("rewards",)
    assert training_keys(PolicyOptions(kl_loss_coef=0.1)) == ("rewards", "ref_logprobs")
    assert training_keys(PolicyOptions(advantage="rloo", kl_coef=0.1, kl_loss_coef=0.1)) == ("rewards", "ref_logprobs")
    assert training_keys(PPOOptions()) == ("rewards", "values", "ref_logprobs")
    assert training_keys(PPOOptions(kl_coef=0.0)) == ("rewards", "values")
    mixed = PPOOptions(advantage={"gae": 0.5, "remax": 0.5}, kl_coef=0.0)
    assert training_keys(mixed) == ("rewards", "values", "greedy_rewards", "greedy_truncated")


def test_a_registered_piece_is_chosen_by_its_name() -> None:
    @register_piece("advantage", "mine", reads=("rewards", "surprise"), options=("gamma",))
    def mine(rollout):
        """Nothing."""

    assert find_piece("advantage", "mine").load() is mine
    assert "mine" in piece_names("advantage")
    assert training_keys(PolicyOptions(advantage="mine")) == ("rewards", "surprise")
    register_piece("advantage", "mine", reads=("rewards",))(mine)
    assert training_keys(PolicyOptions(advantage="mine")) == ("rewards",)


def test_names_cannot_be_taken_twice() -> None:
    def mine(rollout):
        """Nothing."""

    with pytest.raises(ConfigError, match=r"the advantage 'grpo' is taken by realrl\.algo\.policy\.advantages:grpo"):
        register_piece("advantage", "grpo")(mine)
    register_piece("policy_loss", "grpo")(mine)
    with pytest.raises(ConfigError, match="no kind of piece 'advantages'"):
        register_piece("advantages", "mine")  # type: ignore[arg-type]


def test_a_function_can_be_named_by_its_path() -> None:
    assert find_piece("advantage", "tests.helpers.pieces:length").reads == ()
    with pytest.raises(ConfigError, match="is a int, not a function"):
        find_piece("advantage", "tests.helpers.pieces:NOT_A_FUNCTION")
    with pytest.raises(ConfigError, match="there is no module 'no_such'"):
        find_piece("advantage", "no_such:f")


def test_a_registered_function_named_by_its_path_keeps_what_it_declared() -> None:
    from tests.helpers.pieces import length

    register_piece("advantage", "length", reads=("weights",))(length)
    assert find_piece("advantage", "tests.helpers.pieces:length").reads == ("weights",)


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "told"),
    [
        ("advantage", "rollout", "batch, options", r"must take (rollout), not (batch, options)"),
        ("policy_loss", "actions, options, scale=1", "actions", r"must take (actions, options), not (actions)"),
        ("filter", "*given", "batch: int = 3", r"must take (batch, options), not (batch)"),
        ("sampler", "model, prompts, ctx", "model, *, ctx", r"must take (model, prompts, ctx), not (model, *, ctx)"),
    ],
)
def test_the_parameters_of_a_piece(tmp_path: Path, kind: pieces.PieceKind, right: str, wrong: str, told: str) -> None:
    (tmp_path / "mine.py").write_text(f"def right({right}): pass\ndef wrong({wrong}): pass\n")
    assert find_piece(kind, f"{tmp_path}/mine.py:right").reads == ()
    name = f"{tmp_path}/mine.py:wrong"
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.{kind}={name} {told}")):
        find_piece(kind, name)


def test_the_parameters_of_a_registered_piece() -> None:
    register_piece("filter", "of_one")(lambda batch: [])
    with pytest.raises(ConfigError, match=r"filter=of_one must take \(batch, options\), not \(batch\)"):
        chosen_pieces(PolicyOptions(filter="of_one"))


def test_an_unknown_piece_is_refused_with_the_closest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.advantage=gpro: there is no advantage 'gpro'\. Did you mean 'grpo'"
    ):
        chosen_pieces(PolicyOptions(advantage="gpro"))
    with pytest.raises(ConfigError, match=r"algorithm\.policy_loss=clp: .*Did you mean 'clip'"):
        chosen_pieces(PolicyOptions(policy_loss="clp"))
    with pytest.raises(ConfigError, match=r"algorithm\.filter=equal: "):
        chosen_pieces(PolicyOptions(filter="equal"))


def test_a_piece_whose_options_the_experiment_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"advantage=gae reads the option algorithm\.gae_lambda, which this experim"):
        training_keys(PolicyOptions(advantage="gae"))


def test_an_option_that_no_chosen_piece_reads_is_refused() -> None:
    defaults = PolicyOptions()
    check_options_are_read(PolicyOptions(advantage="rloo", kl_coef=0.1), defaults)
    with pytest.raises(
        ConfigError, match=r"algorithm\.kl_coef=0\.1 has no effect: none of .*, advantage=grpo"
    ) as error:
        check_options_are_read(PolicyOptions(kl_coef=0.1), defaults)
    assert "advantage=rloo" in str(error.value)
    with pytest.raises(ConfigError, match=r"algorithm\.clip_ratio=0\.3 has no effect"):
        check_options_are_read(PolicyOptions(policy_loss="reinforce", clip_ratio=0.3), defaults)
    check_options_are_read(PolicyOptions(kl_coef=0.1), PolicyOptions(kl_coef=0.1))
    check_options_are_read(PolicyOptions(entropy_coef=0.1, n_minibatches=2), defaults)


def test_no_advantage_is_refused() -> None:
    for value in ("", {}):
        with pytest.raises(ValueError, match="names no advantage"):
            PolicyOptions(advantage=value)


@pytest.mark.parametrize("flag", [True, False])
def test_a_weight_that_is_no_number_is_refused(flag: bool) -> None:
    with pytest.raises(ValueError, match="true and false are no weights"):
        PolicyOptions(advantage={"grpo": 0.5, "rloo": flag})


def test_choosing_pieces_imports_no_torch() -> None:
    code = (
        "import sys; from realrl.experiment.pieces import training_keys; import realrl.experiment.policy_calls\n"
        "from realrl.config.policy_options import PPOOptions\n"
        "training_keys(PPOOptions()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
