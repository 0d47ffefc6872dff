"""Layers of configuration: which wins, and what the override grammar can say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realrl.config.compose import compose
from realrl.config.schema import RunConfig, SaveConfig
from realrl.errors import ConfigError
from realrl.experiment.declaration import Role
from tests.config.declared import Options, experiment


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    files = {
        "preset/small.yaml": """
            # @package _global_
            steps: 7
            n_seqs: 16
            models:
              "*":
                path: ${cache_dir}/small
                optimizer: {lr: 1e-3}
                backend: native
            """,
        "preset/small/demo.yaml": "# @package _global_\nn_seqs: 24\nmodels: {actor: {optimizer: {eps: 1e-6}}}\n",
        "cluster/pair.yaml": "n_devices_per_node: 2\n",
        "allocation/both.yaml": "mode: manual\ncalls: {gen: d2, ref_inf: 'd1@0:0'}\n",
        "model/big.yaml": "path: /models/big\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.splitlines()
        indent = 12 if lines[0] == "" else 0
        path.write_text("\n".join(line[indent:] for line in lines if line.strip()) + "\n")
    return tmp_path


def test_schema_defaults_are_the_base() -> None:
    config = compose(experiment())
    assert config == RunConfig(experiment="demo", models=dict(config.models), algorithm=Options())
    assert list(config.models) == ["actor", "ref"]
    assert type(config.algorithm) is Options


def test_each_layer_wins_over_the_one_below(config_dir: Path) -> None:
    demo = experiment({"steps": 5, "seed": 5, "n_seqs": 8, "models": {"actor": {"optimizer": {"lr": 0.5, "eps": 0.5}}}})
    assert (compose(demo).steps, compose(demo).seed, compose(demo).n_seqs) == (5, 5, 8)

    config = compose(demo, ["preset=small"], config_dir=config_dir, cache_dir=Path("/cache"))
    assert (config.preset, config.steps, config.seed, config.n_seqs) == ("small", 7, 5, 24)
    assert config.models["actor"].optimizer.lr == 1e-3
    assert config.models["actor"].optimizer.eps == 1e-6
    assert config.models["ref"].path == "/cache/small"

    config = compose(demo, ["n_seqs=4", "preset=small"], config_dir=config_dir, cache_dir=Path("/cache"))
    assert config.n_seqs == 4


def test_a_later_override_wins() -> None:
    assert compose(experiment(), ["steps=2", "steps=3"]).steps == 3


def test_all_roles_at_once_reaches_frozen_roles_only_where_it_makes_sense(config_dir: Path) -> None:
    models = compose(experiment(), ["preset=small"], config_dir=config_dir, cache_dir=Path("/cache")).models
    assert models["actor"].optimizer.lr == 1e-3
    assert models["ref"].optimizer.lr == 1e-5


def test_the_wildcard_on_the_command_line() -> None:
    demo = experiment({"models": {"actor": {"path": "/a"}}})
    config = compose(demo, ["+models.*.optimizer.lr=1e-3", "models.*.backend=megatron", "models.*.path=2024"])
    assert (config.models["actor"].optimizer.lr, config.models["ref"].optimizer.lr) == (1e-3, 1e-5)
    assert (config.models["actor"].backend, config.models["ref"].backend) == ("megatron", "native")
    assert {model.path for model in config.models.values()} == {"2024"}
    config = compose(demo, ["lr=1e-3"])
    assert config.models["actor"].optimizer.lr == 1e-3
    config = compose(demo, ["models.*.path=/b", "models.actor.path=/c"])
    assert config.models["ref"].path == "/c", "it follows the actor, as it does under a wildcard of YAML"
    config = compose(demo, ["models.*.optimizer={lr: 1e-3, weight_decay: 0.5}", "~models.*.optimizer.lr"])
    assert (config.models["actor"].optimizer.lr, config.models["actor"].optimizer.weight_decay) == (1e-5, 0.5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models.*.bakend=megatron", r"^models\.actor\.bakend=megatron: unknown key"),
        ("models.*.backend=magatron", r"models\.actor\.backend=magatron: must be one of native"),
        ("models.*={backend: megatron}", r"models\.\*={backend: megatron}: write models\.\*\.KEY=VALUE"),
        ("models.*=1", r"models\.\*=1: write models\.\*\.KEY=VALUE"),
    ],
)
def test_a_wildcard_that_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(experiment(), [override])


def test_a_wildcard_for_trained_roles_where_none_is() -> None:
    frozen = experiment(roles={"ref": Role(trainable=False)})
    with pytest.raises(ConfigError, match=r"models\.\*\.backend=megatron: no role of this experiment is trained"):
        compose(frozen, ["models.*.backend=megatron"])


def test_the_wildcard_also_works_in_an_experiments_defaults() -> None:
    demo = experiment({"models": {"*": {"path": "/a"}, "actor": {"path": "/b"}}})
    assert {role: model.path for role, model in compose(demo).models.items()} == {"actor": "/b", "ref": "/b"}


def test_a_role_takes_the_path_of_another_until_it_is_given_its_own(config_dir: Path) -> None:
    def paths(*overrides: str) -> list[str]:
        config = compose(experiment(), overrides, config_dir=config_dir, cache_dir=Path("/cache"))
        return [model.path for model in config.models.values()]

    assert paths() == ["tiny", "tiny"]
    assert paths("models.actor.path=/a") == ["/a", "/a"]
    assert paths("models.actor.path=/a", "models.ref.path=/r") == ["/a", "/r"]
    assert paths("models.ref.path=/r") == ["tiny", "/r"]
    assert paths("preset=small", "models.actor.path=/a") == ["/a", "/a"]


def test_roles_that_change_with_the_configuration_take_paths_accordingly() -> None:
    demo = experiment(
        roles={"actor": Role(trainable=True), "ref": Role(trainable=False)},
        role_changes=lambda config: {"ref": Role(False, path_from="actor")} if config.algorithm.kind == "fancy" else {},
    )
    assert compose(demo, ["models.actor.path=/a"]).models["ref"].path == "tiny"
    assert compose(demo, ["models.actor.path=/a", "algorithm.kind=fancy"]).models["ref"].path == "/a"


def test_groups_choose_files(config_dir: Path) -> None:
    config = compose(
        experiment(), ["cluster=pair", "allocation=both", "models.ref=big", "models.ref.path=/x"], config_dir=config_dir
    )
    assert config.cluster.n_devices_per_node == 2
    assert config.allocation.calls == {"gen": "d2", "ref_inf": "d1@0:0"}
    assert config.models["actor"].path == "tiny"
    assert config.models["ref"].path == "/x"
    assert compose(experiment(), ["models.actor=big"], config_dir=config_dir).models["ref"].path == "/models/big"


def test_a_bare_allocation_is_the_mode(config_dir: Path) -> None:
    assert compose(experiment(), ["allocation=d2t2p1"], config_dir=config_dir).allocation.mode == "d2t2p1"
    assert compose(experiment({"allocation": "tensor"})).allocation.mode == "tensor"


def test_a_preset_may_be_a_file_of_ones_own(config_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("steps: 3\nmodels:\n  actor:\n    optimizer:\n      lr: 2e-3\n")
    config = compose(experiment(), [f"preset={path}"], config_dir=config_dir)
    assert (config.preset, config.steps, config.models["actor"].optimizer.lr) == (str(path), 3, 2e-3)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("generation.stop_ids=[3,4]", "generation.stop_ids", (3, 4)),
        ("generation.stop_ids=[]", "generation.stop_ids", ()),
        ("track=[tensorboard,wandb]", "track", ("tensorboard", "wandb")),
        ("models.actor.optimizer.betas=[0.8,0.9]", "models.actor.optimizer.betas", (0.8, 0.9)),
        ("n_mbs=4", "n_mbs", 4),
        ("n_mbs=null", "n_mbs", None),
        ("+steps=4", "steps", 4),
        ("++steps=4", "steps", 4),
        ("models.actor.optimizer.lr=1e-3", "models.actor.optimizer.lr", 1e-3),
        ('allocation.calls.gen="d1@0:0"', "allocation.calls.gen", "d1@0:0"),
        ("allocation.calls.gen=d4t1p2@0:0-7", "allocation.calls.gen", "d4t1p2@0:0-7"),
        ("allocation.calls={gen: d1}", "allocation.calls.gen", "d1"),
        ("dataset={path: x.jsonl, shuffle: false}", "dataset.shuffle", False),
        ("run_dir='a b,c'", "run_dir", "a b,c"),
        ("run_dir=2024_01", "run_dir", "2024_01"),
        ("run_dir=1e3", "run_dir", "1e3"),
        ("run_dir=true", "run_dir", "true"),
        ("run_dir=", "run_dir", ""),
        ("run_dir=runs/${seed}", "run_dir", "runs/1"),
        ("algorithm.inner.width=9", "algorithm.inner.width", 9),
        ("algorithm.weights.a=0.5", "algorithm.weights.a", 0.5),
        ("algorithm.limit=2", "algorithm.limit", 2.0),
        ("preset=null", "preset", ""),
        ("preset=", "preset", ""),
    ],
)
def test_the_override_grammar(override: str, path: str, value: object) -> None:
    found: object = compose(experiment(), [override])
    for part in path.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_dictionaries_are_merged_and_deletions_go_back_to_the_default() -> None:
    demo = experiment({"allocation": {"calls": {"gen": "d1", "train": "d2"}}, "generation": {"top_k": 5, "top_p": 0.5}})
    assert compose(demo, ["allocation.calls={gen: d4}"]).allocation.calls == {"gen": "d4", "train": "d2"}
    assert compose(demo, ["~allocation.calls.gen"]).allocation.calls == {"train": "d2"}
    assert compose(demo, ["~generation.top_k"]).generation.top_k == 0
    assert compose(demo, ["~generation"]).generation.top_p == 1.0
    assert compose(demo, ["~steps"]).steps == 10


def test_the_experiment_is_named_as_other_processes_find_it() -> None:
    assert compose(experiment()).experiment == "demo"
    assert compose(experiment(), reference="/home/me/demo.py").experiment == "/home/me/demo.py"


def test_a_configuration_cannot_be_changed() -> None:
    config = compose(experiment())
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.algorithm.beta = 0.5


def test_values_of_yaml_and_defaults_are_named_with_their_origin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stepz=3: unknown key\. Did you mean 'steps'\? \(from the defaults of exp"):
        compose(experiment({"stepz": 3}))
    path = tmp_path / "mine.yaml"
    path.write_text("generation:\n  top_p: 2\n")
    with pytest.raises(ConfigError, match=r"generation\.top_p=2: must be a number > 0 and <= 1 \(from .*mine\.yaml\)"):
        compose(experiment(), [f"preset={path}"])
    path.write_text("preset: other\n")
    with pytest.raises(ConfigError, match="only the command line chooses a preset"):
        compose(experiment(), [f"preset={path}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("a: [1", "is no YAML that can be used"),
        ("- a\n", "must hold keys and values"),
        ("a: &a [*a]", "the alias 'a' stands inside of what it stands for"),
        (
            "a0: &a0 [1]\n" + "\n".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]" for i in range(1, 9)),
            "more than 10,000 values",
        ),
        ("[" * 3000, "or 20 levels"),
        ("x" * 200_000, "more than 100,000 bytes"),
        ("steps: 0x" + "f" * 6000, "is no YAML that can be used"),
        ('run_dir: "a\\0b"', "run_dir=a.*text needs valid Unicode without NUL"),
        ('models: {"*": 5}', r"models\.\*=5: must be a mapping"),
        ("models: {'*': {optimizer: {lrr: 1}}}", r"optimizer\.lrr=1: unknown key"),
    ],
)
def test_a_preset_file_that_cannot_be_used(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose(experiment(), [f"preset={path}"])


def test_a_preset_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match="cannot be read: it is a pipe, not a file"):
        compose(experiment(), [f"preset={tmp_path}/pipe.yaml"])


def test_yaml_that_hydra_cannot_compose(config_dir: Path) -> None:
    (config_dir / "preset/broken.yaml").write_text("steps: [1\n")
    with pytest.raises(ConfigError, match=r"YAML files in .* cannot be composed"):
        compose(experiment(), ["preset=broken"], config_dir=config_dir)


def test_limits_of_the_machines_and_their_silence() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.n_nodes=64: with cluster\.n_devices_per_node=64 there are 4096"):
        compose(experiment(), ["cluster.n_nodes=64", "cluster.n_devices_per_node=64"])
    with pytest.raises(ConfigError, match=r"worker_timeout_s=1: must be a number >= 2"):
        compose(experiment(), ["cluster.worker_timeout_s=1"])


def test_text_outside_of_ascii_needs_no_quotes() -> None:
    assert compose(experiment(), ["run_dir=прогон/é"]).run_dir == "прогон/é"
    assert compose(experiment(), ["run_dir='прогон x'"]).run_dir == "прогон x"


@pytest.mark.parametrize(
    ("settings", "interval_s", "writes"),
    [
        ({}, 600.0, True),
        ({"every_steps": 3}, 0.0, True),
        ({"every_epochs": 1}, 0.0, True),
        ({"every_s": 5.0}, 5.0, True),
        ({"every_s": 0.0}, 0.0, True),
        ({"at_end": False}, 0.0, False),
        ({"at_end": False, "every_s": 5.0}, 5.0, True),
        ({"at_end": False, "every_steps": 1}, 0.0, True),
    ],
)
def test_the_clock_saves_unless_something_else_is_said(
    settings: dict[str, float], interval_s: float, writes: bool
) -> None:
    save = SaveConfig(**settings)  # type: ignore[arg-type]
    assert (save.interval_s, save.writes) == (interval_s, writes)
    assert save.is_clocked_by_default == (not settings)
    assert save.interval_after(20.0) == interval_s
    assert save.interval_after(100.0) == (interval_s if settings else 3000.0)
