"""Numbers of a run do not depend on launcher, number of workers, placement or micro-batches.

Workers with a mesh each are in `test_run_folder`, whose tests look at such a run anyway.
"""

from pathlib import Path

import pytest

from tests.helpers.runs import assert_same_numbers, run_ppo

TWO = "cluster.n_devices_per_node=2"
VIRTUAL = (TWO, "allocation=pipeline", "calls.actor_train.virtual_stages=2", "allocation.calls.critic_inf=d2")
STREAMED = ("calls.critic_inf.min_n_seqs=2", "calls.actor_gen.balanced_dp=true", "calls.ref_inf.protocol=ALL_TO_ALL")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):
    return run_ppo(tmp_path_factory.mktemp("reference") / "run", "launcher=inline")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("launcher=local",), marks=pytest.mark.slow),
        ("launcher=inline", "n_mbs=3"),
        ("launcher=inline", "max_tokens_per_mb=40"),
        pytest.param((TWO,), marks=pytest.mark.slow),
        pytest.param(VIRTUAL, marks=pytest.mark.slow),  # by default, tests/ranks hold gradients against it
        ("launcher=inline", "calls.actor_train.n_mbs=2", "calls.ref_inf.max_tokens_per_mb=40"),
        pytest.param((TWO, *STREAMED), marks=pytest.mark.slow),  # by default, the passes below are over such a plan
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_plans_agree(reference, overrides: tuple[str, ...], tmp_path: Path) -> None:
    metrics = run_ppo(tmp_path / "run", *overrides)
    assert_same_numbers(reference, metrics, rel=1e-4, floor=1e-6)


@pytest.mark.parametrize(
    "plan",
    [
        (TWO, "n_mbs=2", *STREAMED),
        pytest.param((TWO, "n_mbs=2"), marks=pytest.mark.slow),
        pytest.param(("cluster.n_devices_per_node=4",), marks=pytest.mark.slow),
    ],
)
def test_passes_over_new_minibatches_agree(plan: tuple[str, ...], tmp_path: Path) -> None:
    epochs = ("algorithm.ppo_epochs=2", "algorithm.loss_normaliser=sequences")
    alone = run_ppo(tmp_path / "alone", "launcher=inline", *epochs)
    assert_same_numbers(alone, run_ppo(tmp_path / "run", *plan, *epochs), rel=1e-4, floor=1e-6)


def test_one_seed_gives_the_same_bits(reference, tmp_path: Path) -> None:
    again = run_ppo(tmp_path / "run", "launcher=inline", is_here=False)
    assert_same_numbers(reference, again, rel=0.0, floor=0.0)


def test_another_seed_gives_other_numbers(reference, tmp_path: Path) -> None:
    other = run_ppo(tmp_path / "run", "launcher=inline", "seed=2")
    assert reference[-1]["reward/mean"] != other[-1]["reward/mean"]
