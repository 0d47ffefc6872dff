"""The verdict of the benchmark of a searched plan, and plans that are equal."""

import pytest

from realrl import cli
from scripts import bench_plan as bench

ROUNDS = [
    {"searched": 1.0, "data": 1.2, "split": 1.1, "heuristic": 2.0},
    {"searched": 2.0, "data": 1.9, "split": 1.9, "heuristic": 4.0},
    {"searched": 1.0, "data": 1.6, "split": 1.2, "heuristic": 2.0},
]


def test_the_searched_plan_is_compared_with_the_best_of_the_others_within_each_round():
    assert bench.lead(ROUNDS) == ("split", pytest.approx(1 / 1.1))


def test_what_is_printed(capsys):
    predicted = {"searched": 1.0, "data": 1.3, "split": 1.25, "heuristic": 1.2}
    plans = {"searched": {"gen": 1}, "data": {"gen": 1}, "split": {"gen": 2}, "heuristic": {"gen": 2}}
    bench.show(ROUNDS, predicted, plans)
    told = capsys.readouterr().out
    assert "the searched plan is 10.0% faster than split" in told
    assert "predicted: 20.0% faster than heuristic" in told
    assert "The searched plan is that of data" in told
    assert "that of split" not in told
    slower = [{**one, "split": 0.8 * one["searched"]} for one in ROUNDS]
    bench.show(slower, predicted, plans)
    assert "the searched plan is 25.0% slower than split" in capsys.readouterr().out


def test_plans_are_equal_if_their_runs_have_equal_settings(tmp_path):
    run = ("run", "ppo", "preset=tiny", "steps=1", "n_seqs=8", "launcher=inline", "save.at_end=false")
    own = {"data": ("allocation=data",), "explicit": ("allocation=d1@0:0", "calls.actor_train.n_mbs=1")}
    for name, settings in {**own, "cut": ("calls.actor_train.n_mbs=2",)}.items():
        assert cli.main([*run, *settings, f"run_dir={tmp_path / name}"]) == 0
    found = {name: bench.settings_of(tmp_path / name) for name in (*own, "cut")}
    assert found["data"] == found["explicit"] != found["cut"]
