"""Pairs of runs that a prediction orders, and the file that a run gets."""

import pytest

from realrl import cli
from realrl.sim.report import Pair
from scripts import bench_predict as bench


def result(name, recorded_s, predicted_s, work="ppo"):
    calls = {"gen": Pair(1.0, 1.1), "train": Pair(recorded_s, predicted_s)}
    return bench.Result(name, work, *[Pair(recorded_s, predicted_s)] * 2, calls)


def test_pairs_are_runs_of_the_same_work_that_differ():
    results = [result("a", 1.0, 1.0), result("b", 1.1, 9.0), result("c", 2.0, 0.5), result("d", 4.0, 5.0, "grpo")]
    named = [(fast.name, slow.name, right) for fast, slow, right in bench.pairs(results, same_work=True)]
    assert named == [("a", "c", False), ("b", "c", False)]
    assert len(bench.pairs(results, same_work=False)) == 5
    assert results[0].worst_call == "gen"
    assert results[2].worst_call == "train"


def test_a_run_gets_the_file_of_its_number_of_workers():
    files = ["h100", "two_cores", "two_cores_one_worker"]
    assert [bench.file_for(n, files) for n in (1, 2, 3)] == ["two_cores_one_worker", "two_cores", "h100"]


def test_the_rounds_of_a_run_are_averaged_but_for_the_worst_replay():
    found = bench.merged([result("a", 1.0, 1.1), result("a", 1.5, 1.3)])
    assert found.period == Pair(1.25, (1.1 + 1.3) / 2)
    assert found.calls == {"gen": Pair(1.0, 1.1), "train": Pair(1.25, (1.1 + 1.3) / 2)}
    assert found.replay == Pair(1.5, 1.3)
    assert found.change == 0.5


def test_every_kind_has_plans_of_both_sorts_and_none_twice():
    for kind in bench.KINDS:
        assert not bench.KNOWN[kind].keys() & bench.UNSEEN[kind].keys()
    for model in ("tiny", "smol"):
        kinds = [kind for kind in bench.KINDS if kind.startswith(model)]
        assert sum(len(plans[kind]) for plans in (bench.KNOWN, bench.UNSEEN) for kind in kinds) >= 8


@pytest.mark.slow
def test_a_campaign_with_one_kind(tmp_path, monkeypatch, capsys):
    small = ("preset=tiny", "n_seqs=8", "dataset.max_prompt_tokens=8", "generation.max_new_tokens=4")
    kind = bench.Kind((*small, "launcher=inline"), 1.0, 3)
    monkeypatch.setattr(bench, "KINDS", {"tiny_1": kind})
    monkeypatch.setattr(bench, "KNOWN", {"tiny_1": {"data": ("ppo",)}})
    monkeypatch.setattr(bench, "UNSEEN", {"tiny_1": {"few": ("ppo", "algorithm.n_minibatches=2")}})
    monkeypatch.setattr(bench, "call_realrl", lambda *arguments: str(cli.main([*arguments])))
    monkeypatch.setattr("sys.argv", ["bench_predict.py", "--run", str(tmp_path / "new")])
    bench.main()
    told = capsys.readouterr().out
    assert "tiny_1_data" in told
    assert "tiny_1_few" in told
    assert "same run, other round, worst" in told
    monkeypatch.setattr("sys.argv", ["bench_predict.py", str(tmp_path / "new" / "1" / "tiny_1_few"),
                                     "--hardware", str(tmp_path / "new" / "1" / "tiny_1.yaml")])  # fmt: skip
    bench.main()
    assert "1 runs" in capsys.readouterr().out
