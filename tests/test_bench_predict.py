"""Pairs of runs that a prediction orders, and the file that a run gets."""

from realrl.sim.report import Comparison, Pair
from scripts import bench_predict as bench


def result(name, recorded_s, predicted_s, work="ppo"):
    calls = {"gen": Pair(1.0, 1.1), "train": Pair(recorded_s, predicted_s)}
    return bench.Result(name, work, *[Comparison(Pair(recorded_s, predicted_s), calls, {}, 0.0)] * 2)


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
