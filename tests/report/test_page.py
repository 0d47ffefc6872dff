"""The page: it loads nothing, holds what runs wrote as text alone, and stays small."""

import json
import re

import pytest

from realrl.report import page as page_module
from realrl.report.page import Budget, render_report, report_data
from realrl.report.run_files import read_run
from tests.report.folders import NASTY, sample, steps, write_run
from tests.report.test_times import spans


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        rows = steps(30, reward__mean=lambda step, seed=seed: step * seed, time_s__step=4.0, time_s__actor_gen=1.0,
                     n_tokens=100, memory_gb__0=0.25, memory_gb__1=0.5)  # fmt: skip
        samples = [sample(step, f"{step % 5} + 1 =", str(step), step / 30) for step in range(1, 31)]
        write_run(folder / f"seed{seed}", rows, samples, spans(30), seed=seed)
    return [read_run(folder / f"seed{seed}") for seed in (1, 2)]


@pytest.fixture(scope="module")
def page(runs):
    return render_report(runs)


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_it_loads_nothing(page):
    assert set(re.findall(r"https?://[^\"'\s]*", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert "connect-src" not in page
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|<script src|@import|url\((?!#)", page)
    assert "<!--" not in page, "a part is missing"
    assert "innerHTML" not in page
    assert "eval(" not in page


def test_only_a_live_page_asks_its_server(runs):
    page = render_report(runs, live=True)
    assert "connect-src 'self'" in page
    assert data_of(page)["live"]


def test_the_script_finds_what_it_looks_for(page):
    script = re.search(r"<script>(.*)</script>", page, re.S)[1]
    for name in re.findall(r"byId\('([\w-]+)'\)", script):
        assert f'id="{name}"' in page, name
    data = data_of(page)
    assert set(re.findall(r"(?<![.\w'])data\.(\w+)", script)) <= data.keys()
    for name in re.findall(r"\brun\.(\w+)", script):
        assert name in data["runs"][0], name
    for name in re.findall(r"\bown\.(\w+)\.", script):
        assert name in data["times"][0], name


def test_it_has_the_figures(page):
    data = data_of(page)
    assert data["groups"] == [{"name": "2 seeds", "runs": [0, 1]}]
    assert data["headline"] == "reward/mean"
    assert data["metrics"]["reward/mean"]["1"]["mean"] == [2 * step for step in range(1, 31)]
    assert data["metrics"]["memory_gb/fullest"]["0"] == {"at": 0, "n": 30, "mean": 0.5}
    run = data["runs"][0]
    assert (run["name"], run["seconds"], run["step_s"], run["tokens_per_s"], run["memory_gb"]) == (
        "seed1",
        120,
        4,
        25,
        0.5,
    )
    assert run["at"]["tokens"][-1] == 3000
    assert data["times"][0]["median"] == {"step": 4, "actor_gen": 1}
    assert [len(some) for some in data["samples"]] == [30, 30]
    assert data["differences"] == [["seed", "seed", ["1", "2"]]]
    assert data["plans"][0] == data["plans"][1], "seeds have one plan"
    assert data["plans"][0]["calls"]["actor_gen"] == {
        "role": "actor", "kind": "generate", "css": "gen", "place": "d1t1p1@0:0", "devices": "0",
    }  # fmt: skip
    assert page.count('class="picture"') == 1


def test_what_runs_write_stays_text(tmp_path):
    rows = [{"step": 1, NASTY: 1.0, "time_s/" + NASTY: 2.0}]
    nasty_spans = [(0, NASTY, "call", 0.0, 1.0, {"step": 1, "role": NASTY, "dispatch": 0})]
    folder = write_run(tmp_path / "<b>a", rows, [sample(1, NASTY, "\ud800" + NASTY)], nasty_spans, extra={NASTY: NASTY})
    page = render_report([read_run(folder)])
    assert "<img" not in page
    assert page.count("</script>") == 2
    page.encode()
    data = data_of(page)
    assert data["samples"][0][0]["turns"][0][1] == NASTY
    assert NASTY in data["metrics"]
    assert any(NASTY in path for path, _ in data["settings"])


def test_experiments_of_other_peoples_files_are_not_run(tmp_path):
    code = tmp_path / "mine.py"
    code.write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    rows = steps(2, x=1.0)
    [own] = [read_run(write_run(tmp_path / "a", rows, spans=spans(2), experiment=str(code)))]
    data = data_of(render_report([own]))
    assert data["title"] == "mine: a"
    assert data["plans"][0]["picture"] is None
    assert f"realrl graph {code}" in data["plans"][0]["reason"]
    assert not (tmp_path / "was_run").exists()
    broken = read_run(write_run(tmp_path / "b", rows, algorithm={"no_such": 1}))
    assert "The plan cannot be made again" in data_of(render_report([broken]))["plans"][0]["reason"]


def test_paths_count_from_where_the_run_began(tmp_path, monkeypatch):
    """The plan is made in any folder, of rewards and pieces in files beside the run."""
    (tmp_path / "mine.py").write_text("def score(prompt, response):\n    return 1.0\n")
    overrides = ("preset=tiny", "algorithm.reward_function=mine.py:score")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        folder = write_run(tmp_path / "a", steps(2, x=1.0), overrides=overrides, working_folder=str(tmp_path))
    [run] = [read_run(folder)]
    assert data_of(render_report([run]))["plans"][0]["reason"] == ""
    assert "working_folder" not in run.settings
    (tmp_path / "mine.py").unlink()
    reason = data_of(render_report([run]))["plans"][0]["reason"]
    assert f"there is no file '{tmp_path}/mine.py'" in reason


def test_empty_runs_and_other_algorithms(tmp_path):
    empty = read_run(write_run(tmp_path / "empty"))
    data = data_of(render_report([empty]))
    assert (data["metrics"], data["headlines"], data["samples"]) == ({}, [], [[]])
    other = read_run(write_run(tmp_path / "sft", steps(5, actor__loss=1.0), name="sft"))
    data = data_of(render_report([empty, other]))
    assert data["title"] == "2 runs of ppo, sft"
    assert data["metrics"]["actor/loss"] == {"1": {"at": 0, "n": 5, "mean": 1}}
    assert len(data["groups"]) == 2


def test_the_metrics_of_an_own_algorithm_come_first(tmp_path):
    rows = steps(3, actor__grad_norm=2.0, best__reward__mean=1.0, time_s__step=0.5)
    data = data_of(render_report([read_run(write_run(tmp_path / "own", rows))]))
    assert data["headline"] == "best/reward/mean"
    assert data["headlines"][:2] == ["best/reward/mean", "actor/grad_norm"]


def test_a_page_of_long_runs_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "MOST_BYTES", 400_000)
    found = []
    for i in range(8):
        rows = steps(400, **{f"m{j}": lambda step, j=j: (step * 7919 * (j + 1) % 1000) / 997 for j in range(9)})
        samples = [sample(s, f"{s} " + "\u4e00" * 2000, "\u6c49" * 3000, s) for s in range(1, 41)]
        found.append(read_run(write_run(tmp_path / str(i), rows, samples, spans(20), n_seqs=i + 1)))
    page = render_report(found)
    assert 200_000 < len(page.encode()) <= 400_000
    data = data_of(page)
    assert len(data["metrics"]["m0"]) == 8
    assert all(len(some) >= 3 for some in data["samples"])


def test_restarts_are_told(tmp_path):
    folder = write_run(tmp_path / "a", steps(40, x=1.0), spans=spans(10, first=31))
    (folder / "trace.json").rename(folder / "trace-1.json")
    other = write_run(tmp_path / "b", spans=spans(3, first=21))
    (other / "trace.json").rename(folder / "trace.json")
    assert report_data([read_run(folder)])["runs"][0]["attempts"] == [21]


def test_many_runs_show_their_main_metrics(tmp_path):
    rows = steps(30, reward__mean=lambda step: step / 7, **{f"m{j}": float for j in range(120)})
    found = []
    for i in range(6):
        found.append(read_run(write_run(tmp_path / str(i), rows, [sample(1), sample(2)], n_seqs=i + 1)))
    data = report_data(found, Budget(numbers=5000, samples=24))
    assert list(data["metrics"]) == ["reward/mean"]
    assert data["notes"][0][0] == "all runs"
    assert sum(map(bool, data["samples"])) == 4
