"""Experiments by name, file and module; the YAML that goes with them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.config.compose import compose
from realrl.config.serialize import dump_config
from realrl.errors import ConfigError, UsageError
from realrl.experiment.declaration import Experiment
from realrl.experiment.discovery import (
    config_dir,
    experiment_names,
    forget_files,
    list_experiments,
    load_experiment,
    load_run,
    stable_reference,
)
from realrl.experiment.loading import load_object
from realrl.graph.mfc import InterfaceType, MFCDef

SOURCE = """
from realrl import DatasetKind, Experiment, Role

EXPERIMENT = Experiment(
    name="mine", description="d", roles={"actor": Role(trainable=True)}, dataset=DatasetKind.PROMPT, mfcs=lambda c: []
)
"""


@pytest.fixture(autouse=True)
def clean_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_registered_names() -> None:
    names = experiment_names()
    assert {"ppo", "rw", "sft"} <= set(names)
    assert names == sorted(names)
    for name, experiment in zip(names, list_experiments(), strict=True):
        assert experiment.name == name
        assert experiment.description
    assert load_experiment("ppo") is load_experiment("ppo")


def test_yaml_folder() -> None:
    assert (config_dir() / "preset/tiny.yaml").is_file()


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my_demo_algorithm.py"
    path.write_text(SOURCE)
    experiment = load_experiment("./my_demo_algorithm.py")
    assert experiment.name == "mine"
    assert load_experiment(str(path)) is experiment
    assert stable_reference("my_demo_algorithm.py") == str(path)
    assert stable_reference("ppo") == "ppo"


def test_files_next_to_it_can_be_imported(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "my_demo_parts.py").write_text("NAME = 'mine'\n")
    (folder / "my_demo_whole.py").write_text("from my_demo_parts import NAME\n" + SOURCE.replace('"mine"', "NAME"))
    assert load_experiment("deep/my_demo_whole.py").name == "mine"


def test_files_of_one_name_in_two_folders_are_different(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_demo_twin.py").write_text(SOURCE.replace("mine", folder))
    assert load_experiment("a/my_demo_twin.py").name == "a"
    assert load_experiment("b/my_demo_twin.py").name == "b"
    assert load_experiment("b/my_demo_twin.py") is load_experiment("b/my_demo_twin.py")
    (tmp_path / "json.py").write_text(SOURCE)
    assert load_experiment("./json.py").name == "mine"


def test_a_module(tmp_path: Path) -> None:
    (tmp_path / "my_demo_package").mkdir()
    (tmp_path / "my_demo_package/algorithm.py").write_text(SOURCE)
    assert load_experiment("my_demo_package.algorithm").name == "mine"
    assert stable_reference("my_demo_package.algorithm") == "my_demo_package.algorithm"


def test_another_process_rebuilds_the_run_from_its_json(tmp_path: Path) -> None:
    (tmp_path / "my_demo_run.py").write_text(SOURCE)
    experiment = load_experiment("my_demo_run.py")
    config = compose(experiment, ["steps=3"], reference=stable_reference("my_demo_run.py"))
    found, loaded = load_run(dump_config(config))
    assert found is experiment
    assert loaded == config


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("pppo", r"there is no experiment 'pppo'\. Did you mean 'ppo' or .*\?\n  Choose from .*ppo, .*rw, .*sft"),
        ("./nowhere.py", r"there is no experiment file '\./nowhere\.py'"),
        ("./my_demo_filee.py", r"no experiment file '\./my_demo_filee\.py'\. Did you mean '\./my_demo_file\.py'\?"),
        ("no_such_package.algorithm", r"no experiment or module 'no_such_package\.algorithm'"),
        ("a-b.c", r"there is no experiment 'a-b\.c'"),
        ("my_demo_file", r"there is no experiment 'my_demo_file'\. Did you mean \./my_demo_file\.py\?"),
    ],
)
def test_unknown(tmp_path: Path, reference: str, message: str) -> None:
    (tmp_path / "my_demo_file.py").write_text(SOURCE)
    with pytest.raises(ConfigError, match=message):
        load_experiment(reference)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ny = x +\n", r"SyntaxError: invalid syntax\n  .*my_demo_bad\.py:2: y = x \+"),
        ("x = 1\n\ny = x / 0\n", r"ZeroDivisionError: division by zero\n  .*my_demo_bad\.py:3: y = x / 0"),
        (
            "import no_such_thing\n",
            r"ModuleNotFoundError: No module named 'no_such_thing'\n  .*my_demo_bad\.py:1: import",
        ),
        (
            "EXPERIMENTS = 1\n",
            r"it has no attribute EXPERIMENT\. Did you mean 'EXPERIMENTS'\?\n  End it with EXPERIMENT",
        ),
        ("EXPERIMENT = None\n", r"EXPERIMENT in '\./my_demo_bad\.py' is of type NoneType, not realrl\.Experiment"),
        ("import sys\nsys.exit(0)\n", r"called exit\(0\), which ends no run\n  .*my_demo_bad\.py:2: sys\.exit"),
        ("import os\nos._exit(0)\n", r"called exit\(0\), which ends no run\n  .*my_demo_bad\.py:2: os\._exit"),
        ("x = " + "-" * 20_000 + "1\n", r"cannot be imported: (RecursionError|MemoryError|SyntaxError)"),
        (SOURCE.replace('"actor"', '"../x"'), r"an impossible roles\['\.\./x'\]: it must be named by letters"),
        (SOURCE.replace('"mine"', '"../x"'), r"an impossible name: it must be at most 64 letters"),
        (SOURCE.replace("lambda c: []", "lambda: []"), r"an impossible mfcs: it must be a function from the"),
        (SOURCE.replace("Role(trainable=True)", "Role('yes')"), r"an impossible role 'actor': it must be a Role\("),
        ("EXPERIMENT = 3\n", r"EXPERIMENT in '\./my_demo_bad\.py' is of type int, not realrl\.Experiment"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "my_demo_bad.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_experiment("./my_demo_bad.py")


def test_a_module_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "my_demo_broken").mkdir()
    (tmp_path / "my_demo_broken/__init__.py").write_text("")
    (tmp_path / "my_demo_broken/algorithm.py").write_text("import no_such_thing\n")
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError.*\n  .*algorithm\.py:1: import no_such_thing"):
        load_experiment("my_demo_broken.algorithm")
    (tmp_path / "my_demo_broken/other.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError.*\n  .*other\.py:1: 1 / 0"):
        load_experiment("my_demo_broken.other")


def test_a_variant_takes_its_ancestors_part_of_a_preset(tmp_path: Path) -> None:
    def n_seqs(experiment: Experiment, folder: Path) -> tuple[int, str]:
        config = compose(experiment, ["preset=tiny"], config_dir=folder)
        return config.n_seqs, config.algorithm.reward_function

    mine = load_experiment("grpo").variant("mine", "d")
    assert n_seqs(mine, config_dir()) == (8, "realrl.data.tiny:toy_reward")
    own = {"n_seqs": 6, "algorithm": {"reward_function": "math:hypot"}}
    assert n_seqs(mine.variant("younger", "d", defaults=own), config_dir()) == (6, "math:hypot")
    assert n_seqs(load_experiment("rloo").variant("nearest", "d"), config_dir())[0] == 16
    shutil.copytree(config_dir(), tmp_path / "configs")
    (tmp_path / "configs/preset/tiny/mine.yaml").write_text("# @package _global_\nn_seqs: 12\n")
    assert n_seqs(mine, tmp_path / "configs") == (12, None)


def test_calls_without_n_seqs_take_those_of_the_run() -> None:
    calls = [
        MFCDef("a", "actor", InterfaceType.TRAIN_STEP, "sft"),
        MFCDef("b", "b", InterfaceType.INFERENCE, "x", n_seqs=2),
    ]
    experiment = replace(load_experiment("sft"), mfcs=lambda config: calls)
    assert [mfc.n_seqs for mfc in experiment.calls(compose(experiment, ["n_seqs=5"]))] == [5, 2]


@pytest.mark.parametrize(
    ("mfcs", "message"),
    [
        ("lambda c: 5", "gives int for a list of MFCDef"),
        ("lambda c: [MFCDef('a', [], N.GENERATE, 'ppo_actor')]", "has model_name=.*another type than MFCDef says"),
        ("lambda c: [MFCDef('a', 'actor', N.GENERATE, 'ppo_actor', 5)]", "has input_keys=5"),
    ],
)
def test_calls_of_another_type(tmp_path: Path, mfcs: str, message: str) -> None:
    imports = "from realrl import InterfaceType as N, MFCDef\n"
    (tmp_path / "my_demo_calls.py").write_text(imports + SOURCE.replace("lambda c: []", mfcs))
    experiment = load_experiment("./my_demo_calls.py")
    with pytest.raises(UsageError, match=message):
        experiment.calls(compose(experiment))


def test_a_file_that_registers_pieces_is_read_anew() -> None:
    """Its modules are gone, its registrations are not: they are those of the same file."""
    registers = """
from realrl import ModelInterface, register_interface, register_piece, register_protocol

@register_interface("read_anew")
class Mine(ModelInterface):
    pass

@register_piece("filter", "read_anew")
def mine(batch, options):
    return [True] * len(batch)

def distribute(ids, token_counts, layout):
    return []

register_protocol("READ_ANEW", distribute, distribute)
"""
    path = Path("mine_anew.py")
    path.write_text(SOURCE + registers)
    first = load_experiment("./mine_anew.py")
    forget_files("./mine_anew.py")
    load_object("mine_anew.py:Mine")  # the same file under the name of a piece
    assert load_experiment("./mine_anew.py") is not first
    Path("other.py").write_text(registers)
    with pytest.raises(ConfigError, match="the interface name 'read_anew' is taken by mine_anew:Mine"):
        load_object("other.py:Mine")
