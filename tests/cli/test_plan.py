"""``realrl plan``, plans that other commands take, and runs that plan by themselves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from realrl import cli
from realrl.cli import plan as cli_plan
from realrl.cli.plan_found_view import Line, differences
from realrl.plan.memory.plan import show_bytes
from realrl.planner.evaluate import evaluate
from realrl.planner.planner import Progress
from realrl.profiler.hardware_files import named_hardware
from realrl.search.local import compiled
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, run_ppo
from tests.planner.cases import everywhere, request_for

TWO = ("preset=tiny", "cluster.n_devices_per_node=2")
EIGHT = ("preset=tiny", "cluster.n_devices_per_node=8")


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def realrl(capsys, *arguments):
    """Exit code, output and errors of a command."""
    code = cli.main(list(map(str, arguments)))
    told = capsys.readouterr()
    return code, told.out, told.err


def refused(capsys, *arguments):
    """The message of a refusal."""
    code, _, told = realrl(capsys, *arguments)
    assert code == 2
    return told


def rows(printed, title):
    """The rows of a table by their first cell."""
    lines = printed.partition(f"\n{title}")[2].partition("\n\n")[0].splitlines()
    return {line.split()[0]: line.split() for line in lines if line}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A plan for two workers."""
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    assert cli.main(["plan", "ppo", *TWO, "--out", str(path)]) == 0
    return path


def test_a_plan_is_printed(capsys):
    code, printed, _ = realrl(capsys, "plan", "ppo", *TWO)
    assert code == 0
    assert "ppo: a plan for 1 node of 2 devices, two cores" in printed
    assert "the longest that the configuration allows" in printed
    assert "by the real scheduler (steps 2 to 4)" in printed
    assert "no plan under the fast model is faster than" in printed
    calls = rows(printed, "Calls")
    assert {"actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train"} < calls.keys()
    memory = rows(printed, "Memory of each device")
    assert len(memory) >= 2
    assert "what bounds the period" in printed
    assert "Other plans" in printed
    assert "--out FILE saves the plan" in printed


@pytest.mark.slow  # also whatever the number of processes: tests/planner/test_crew.py
def test_the_same_seed_gives_the_same_plan(capsys, made, workplace):
    assert realrl(capsys, "plan", "ppo", *TWO, "--out", "again.yaml")[0] == 0
    assert (workplace / "again.yaml").read_text() == made.read_text()


def test_a_plan_works_for_every_command(capsys, made):
    plan = f"plan={made}"
    places = yaml.safe_load(made.read_text())["settings"]["allocation"]["calls"]
    code, printed, _ = realrl(capsys, "run", "ppo", *TWO, plan, "--dry-run")
    assert code == 0
    assert {name: row[6] for name, row in rows(printed, "Calls").items() if name in places} == {
        name: place.partition("@")[0] for name, place in places.items()
    }
    code, printed, _ = realrl(capsys, "doctor", "ppo", *TWO, plan, "--hardware", "two_cores", "--no-models")
    assert code == 0
    assert "only the machine itself could tell" in printed
    assert f"of {show_bytes(int(named_hardware('two_cores').device.memory_bytes))}" in printed
    assert realrl(capsys, "graph", "ppo", *TWO, plan)[0] == 0
    assert realrl(capsys, "config", "ppo", *TWO, plan)[0] == 0
    code, printed, _ = realrl(capsys, "simulate", "ppo", *TWO, plan)
    assert code == 0
    assert "2 workers" in printed


def test_pins_and_settings_are_kept(capsys):
    pins = ("allocation.calls.actor_gen=t2", "allocation.calls.rew_inf=d1@0:1")
    given = ("n_mbs=2", "models.*.optimizer.zero_stage=0", "models.actor.activation_checkpointing=true")
    code, _, _ = realrl(capsys, "plan", "ppo", *TWO, *pins, *given, "allocation.offload=[ref]", "--out", "p.yaml")
    assert code == 0
    with open("p.yaml") as file:
        settings = yaml.safe_load(file)["settings"]
    places = settings["allocation"]["calls"]
    assert places["actor_gen"] == "d1t2p1@0:0-1"
    assert places["rew_inf"] == "d1t1p1@0:1"
    assert settings["allocation"]["offload"] == ["ref"]
    assert "calls" not in settings
    assert settings["models"]["actor"] == {
        "activation_checkpointing": True,
        "optimizer": {"zero_stage": 0, "offload": False},
    }
    same = (*TWO, *pins, *given, "allocation.offload=[ref]", "plan=p.yaml")
    assert realrl(capsys, "run", "ppo", *same, "--dry-run")[0] == 0  # a strategy alone means the mesh of the plan


def test_machines_that_are_not_here(capsys):
    modelled = ("grpo", *EIGHT, "cluster.n_nodes=2", "--hardware", "h100")
    assert realrl(capsys, "plan", *modelled, "--seconds", "20", "--out", "p.yaml")[0] == 0
    code, printed, _ = realrl(capsys, "run", *modelled, "plan=p.yaml", "--dry-run")
    assert code == 0
    assert "16 workers: 2 nodes of 8 devices, cuda" in printed
    assert "bf16" in printed
    code, printed, _ = realrl(capsys, "doctor", *modelled, "plan=p.yaml", "--no-models")
    assert code == 0
    assert "of 80.0 GB" in printed
    assert (
        "is a plan for 2 nodes of 8 devices of type cuda, and this run has 2 nodes of 8 devices of type cpu"
        in refused(capsys, "graph", *modelled[:-2], "plan=p.yaml", "cluster.device=cpu")
    )
    assert "a run takes the machine that it is on" in refused(capsys, "run", "ppo", *TWO, "--hardware", "h100")


def test_what_is_refused(capsys, made):
    plan, two = f"plan={made}", ("plan", "ppo", *TWO)
    assert "realrl plan makes a plan" in refused(capsys, *two, plan)
    assert "realrl plan decides where calls run" in refused(capsys, *two, "allocation=split")
    assert "there is no call 'actor_gne'" in refused(capsys, *two, "allocation.calls.actor_gne=d2")
    assert "allocation.calls.ref_inf: mesh '0:0-7' lies outside" in refused(
        capsys, *two, "allocation.calls.ref_inf=d8@0:0-7"
    )
    assert "there is no such hardware. Did you mean 'h100'" in refused(capsys, *two, "--hardware", "h10")
    assert "exceed generation.max_new_tokens=16" in refused(
        capsys, *two, "--lengths", "prompt=fixed:8 response=fixed:99"
    )
    assert "there is no such method" in refused(capsys, *two, "--method", "best")
    assert "--seconds 0 is no time" in refused(capsys, *two, "--seconds", "0")
    assert "--top 0" in refused(capsys, *two, "--top", "0")
    unused = ("plan", "sft", *TWO, "generation.max_new_tokens=5")
    assert "generation.max_new_tokens=5: has no effect" in refused(capsys, *unused)
    assert "call 'ref_inf' is pinned to d3t1p1" in refused(capsys, "plan", "ppo", *EIGHT, "allocation.calls.ref_inf=d3")
    assert "--out none/p.yaml cannot be written: its folder does not exist" in refused(
        capsys, *two, "--out", "none/p.yaml"
    )
    assert "--out /dev/null cannot be written: it is a device" in refused(capsys, *two, "--out", "/dev/null")
    run = ("run", "ppo", *TWO, plan, "--dry-run")
    assert f"{plan} says already where each call runs" in refused(capsys, *run, "allocation=split")
    assert f"{plan} says already where each call runs" in refused(capsys, *run, "allocation=eight_meshes")
    assert "is a plan for 1 node of 2 devices" in refused(capsys, *run, "cluster.n_devices_per_node=4")
    assert "is a plan for 'ppo', not for 'grpo'" in refused(capsys, "run", "grpo", *TWO, plan, "--dry-run")
    with open("own.yaml", "w") as file:
        file.write("plan: x.yaml\n")
    assert "only the command line chooses a plan" in refused(capsys, "run", "ppo", "preset=own.yaml", "--dry-run")


def test_a_machine_that_is_too_small(capsys, workplace):
    text = yaml.safe_dump({"name": "tiny", **_machine(memory_bytes="10 MB")})
    (workplace / "small.yaml").write_text(text)
    told = refused(capsys, "plan", "ppo", *TWO, "--hardware", "small.yaml")
    assert "it may use 9.0 MB of a device" in told
    assert "in critic_train" in told


def _machine(**device):
    from realrl.experiment.discovery import config_dir

    found = yaml.safe_load((config_dir() / "hardware" / "two_cores.yaml").read_text())
    found["device"] |= device
    return {key: value for key, value in found.items() if key != "name"}


@pytest.mark.parametrize("moment", ["pricing", pytest.param("searching", marks=pytest.mark.slow)])
def test_ctrl_c_prints_the_best_plan_so_far(workplace, moment):
    command = [sys.executable, "-m", "realrl", "plan", "ppo", *EIGHT, "cluster.n_nodes=4", "--hardware", "h100"]
    terminal, theirs = os.openpty()
    process = subprocess.Popen([*command, "--out", "p.yaml"], stdout=theirs, stderr=subprocess.PIPE, cwd=workplace)
    os.close(theirs)
    shown, is_sent = b"", False
    with contextlib.suppress(OSError):  # the end of a terminal
        while read := os.read(terminal, 4096):
            shown += read
            if not is_sent and moment.encode() in shown:
                is_sent = True
                process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=90)
    os.close(terminal)
    assert process.returncode == 130, told
    assert told == (
        b"realrl: interrupted: simulating the best plan so far; Ctrl-C again ends at once\n"
        b"realrl: interrupted: this is the best plan so far\n"
    )
    assert b"wrote p.yaml" in shown
    assert os.path.exists(workplace / "p.yaml")


def test_a_plan_is_written_though_nobody_reads_the_output(workplace):
    command = [sys.executable, "-m", "realrl", "plan", "ppo", *TWO, "--method", "data", "--out", "p.yaml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=workplace) as process:
        process.stdout.close()  # as head does after some lines
    assert os.path.exists(workplace / "p.yaml")


def test_a_ctrl_c_that_a_library_loses_comes_back():
    with cli_plan._interruptible() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()


def test_a_search_that_is_not_compiled_says_why(capsys, monkeypatch):
    monkeypatch.setattr(compiled, "why_not_compiled", lambda n_calls: "there is no C++ compiler (g++)")
    words = ("cluster.device=cuda", "precision=bf16", "--hardware", "h100", "--seconds", 1)
    code, told, _ = realrl(capsys, "plan", "ppo", *EIGHT, *words)
    assert code == 0
    assert "has looked at fewer plans: there is no C++ compiler (g++)" in told


@pytest.mark.slow
def test_a_run_plans_by_itself(capsys, workplace):
    two = ("cluster.n_devices_per_node=2", "steps=2")
    ours = run_ppo(workplace / "auto", *two, "allocation=auto")
    assert "allocation=auto: " in capsys.readouterr().out
    content = yaml.safe_load((workplace / "auto" / "plan.yaml").read_text())
    resolved = json.loads((workplace / "auto" / "config.json").read_text())
    assert resolved["allocation"]["mode"] == "manual"
    assert resolved["allocation"]["calls"] == content["settings"]["allocation"]["calls"]
    theirs = run_ppo(workplace / "data", *two, "allocation=data")
    assert_same_numbers(ours, theirs, rel=1e-4, floor=1e-5)
    again = ("run", "ppo", *SMALL, f"run_dir={workplace / 'auto'}", *two, "steps=3", "resume=auto", "allocation=auto")
    code, printed, _ = realrl(capsys, *again)
    assert code == 0
    assert f"allocation=auto: the plan in {workplace / 'auto' / 'plan.yaml'}" in printed
    assert len(read_metrics(workplace / "auto")) == 3
    longer = (*again[:-3], "steps=4", *again[-2:], "--dry-run")
    _check_the_plan_that_is_kept(capsys, workplace / "auto" / "plan.yaml", longer)


def _check_the_plan_that_is_kept(capsys, plan, again):
    """A plan that cannot be taken again is refused, with a way out; without one, the run is planned anew."""
    whole = plan.read_text()
    assert "not allocation.calls.rew_inf=" in refused(capsys, *again, f"allocation.calls.rew_inf={_elsewhere(whole)}")
    for damaged in (whole[: len(whole) // 2], whole.replace(":0", ":9"), "", "settings: ["):
        plan.write_text(damaged)
        told = refused(capsys, *again)
        assert told.startswith(f"realrl: error: allocation=auto: {plan}")
        assert f"or remove {plan} to plan anew" in told
    plan.unlink()
    code, printed, _ = realrl(capsys, *again)
    assert code == 0
    assert f"allocation=auto: there is no {plan}; planning anew" in printed


def _elsewhere(content):
    """A place for rew_inf other than that of a plan."""
    place = yaml.safe_load(content)["settings"]["allocation"]["calls"]["rew_inf"]
    return "d1@0:1" if place == "d1t1p1@0:0" else "d1@0:0"


def test_one_device_needs_no_plan(capsys):
    code, printed, _ = realrl(capsys, "run", "ppo", "preset=tiny", "allocation=auto", "--dry-run")
    assert code == 0
    assert "allocation=auto: " not in printed
    assert "d1t1p1" in printed


@pytest.mark.slow
def test_a_plan_with_a_mesh_for_every_call_runs(workplace, capsys):
    """Calls on six different meshes of eight workers, by a plan's file: the numbers of data parallelism."""
    from realrl.experiment.discovery import config_dir

    places = yaml.safe_load((config_dir() / "allocation" / "eight_meshes.yaml").read_text())["calls"]
    pins = [f"allocation.calls.{name}={place}" for name, place in places.items()]
    assert realrl(capsys, "plan", "ppo", *EIGHT, *SMALL[1:], *pins, "--out", "p.yaml")[0] == 0
    ours = run_ppo(workplace / "plan", "cluster.n_devices_per_node=8", "plan=p.yaml")
    theirs = run_ppo(workplace / "data", "allocation=data")
    assert_same_numbers(ours, theirs, rel=1e-3, floor=1e-4)
    config = json.loads((workplace / "plan" / "config.json").read_text())
    assert len(set(config["allocation"]["calls"].values())) == 6


def test_a_line_of_a_terminal():
    class Terminal(list):
        write = list.append

        def isatty(self):
            return True

        def flush(self):
            pass

    terminal = Terminal()
    line = Line(terminal)
    line.show(Progress("prices"))
    line.show(Progress("search", 12.0, 10.0))
    line.clear()
    assert terminal[0] == "\rpricing the choices of every call"
    assert terminal[1].strip() == "searching: 12 s a step, at most 20.0% above the best possible"
    assert set(terminal[2]) == {"\r", " "}


def test_differences():
    request = request_for(devices=4, hardware="two_cores")
    alike = everywhere(request, "d2t1p2@0:0-3")
    more = replace(
        alike,
        allocations={**alike.allocations, "actor_gen": "d4t1p1@0:0-3"},
        n_mbs={"actor_train": 2},
        zero_stage={"actor": 1},
        offload=("ref",),
    )
    first, second = (evaluate(request, settings) for settings in (more, alike))
    told = "actor_gen d2t1p2@0:0-3, actor_train n_mbs=4, actor zero_stage=default, offload=none"
    assert differences(first, second) == told
    assert "actor_train n_mbs=2" in differences(second, first)
    assert differences(first, first) == "nothing"
    usual = evaluate(request, replace(alike, n_mbs={"actor_train": 4}))
    assert differences(usual, second) == "nothing"  # four is what the strategy has


def test_a_plan_that_only_takes_the_least_memory_says_so(capsys):
    long = ("dataset.max_prompt_tokens=512", "generation.max_new_tokens=512", "n_seqs=512", "algorithm.n_minibatches=1")
    tight = ("precision=fp32", "cluster.device_rows_gb=0", "cluster.device_memory_gb=0.95", "--hardware", "h100")
    code, printed, _ = realrl(capsys, "plan", "ppo", "preset=tiny", *long, *tight)
    assert code == 0
    assert "this is the plan that takes the least memory" in printed
