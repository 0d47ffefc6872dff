"""Every message that a wrong configuration can cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from realrl.config.compose import compose
from realrl.config.schema import RunConfig, Section
from realrl.errors import ConfigError
from realrl.experiment.discovery import load_experiment
from tests.config.declared import Options, experiment


def errors(*overrides: str, config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(experiment(), overrides, config_dir=config_dir)
    assert caught.value.exit_code == 2
    assert str(caught.value).endswith("All keys, their defaults and what they accept: realrl config demo")
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # unknown keys
        ("stesp=3", "stesp=3: unknown key. Did you mean 'steps'?"),
        ("max_new_tokens=3", "max_new_tokens=3: unknown key. Did you mean 'generation.max_new_tokens'?"),
        ("generation.temprature=1", "Did you mean 'generation.temperature'?"),
        ("warmup_fraction=0", "Did you mean 'models.actor.optimizer.warmup_fraction'?"),
        ("zzzzzz=1", "zzzzzz=1: unknown key.\n"),
        ("experiment=ppo", "experiment=ppo: unknown key."),
        ("models.actr.path=x", "no role 'actr'; the roles are actor, ref. Did you mean 'actor'?"),
        ("models.ref.backend=megatron", "role 'ref' is frozen: it is not trained and has no backend"),
        ("models.ref.optimizer.lr=1", "role 'ref' is frozen: it is not trained and has no optimizer"),
        ("algorithm.betta=1", "algorithm.betta=1: unknown key. Did you mean 'algorithm.beta'?"),
        ("algorithm.inner.height=1", "algorithm.inner.height=1: unknown key."),
        ("allocation.calls.gen.x=d1", "allocation.calls.gen.x=d1: unknown key."),
        ("dataset={path: x, shufle: true}", "dataset.shufle=true: unknown key. Did you mean 'dataset.shuffle'?"),
        ("~stesp", "~stesp: unknown key. Did you mean 'steps'?"),
        # sections and values
        ("generation=3", "generation=3: is a section, not a value; its keys are generation.n_responses, "),
        ("steps.x=3", "steps.x=3: unknown key."),
        ("steps={a: 1}", "steps={a: 1}: must be a whole number >= 1"),
        ("calls=3", "calls=3: must be a mapping {name: {n_mbs, max_tokens_per_mb, min_n_seqs, balanced_dp, "),
        ("calls.gen=3", "calls.gen=3: must be a mapping {name: {n_mbs, max_tokens_per_mb, "),
        ("calls.gen.n_mb=3", "calls.gen.n_mb=3: unknown key. Did you mean 'calls.gen.n_mbs'?"),
        ("calls.gen.n_mbs=0", "calls.gen.n_mbs=0: must be a whole number >= 1 or null"),
        ("calls.gen.max_tokens_per_mb=all", "calls.gen.max_tokens_per_mb=all: must be a whole number >= 1 or null"),
        ("calls.gen.min_n_seqs=0", "calls.gen.min_n_seqs=0: must be a whole number >= 1 or null"),
        ("calls.gen.max_staleness=-1", "calls.gen.max_staleness=-1: must be a whole number >= 0 or null"),
        ("calls.gen.max_staleness=true", "calls.gen.max_staleness=true: must be a whole number >= 0 or null"),
        ("calls.gen.balanced_dp=maybe", "calls.gen.balanced_dp=maybe: must be true or false or null"),
        ("calls.gen.protocol=''", "calls.gen.protocol='': must be text that is not empty or null"),
        (
            "calls={gen: {n_mbs: 2, max_tokens_per_mb: 9}}",
            "calls.gen.max_tokens_per_mb=9: calls.gen.n_mbs=2 is given too; micro-batches follow one of them, so set "
            "the other to null",
        ),
        ("allocation.calls=3", "allocation.calls=3: must be a mapping {name: value}, each value text"),
        # types
        ("steps=many", "steps=many: must be a whole number >= 1"),
        ("steps=1.5", "steps=1.5: must be a whole number >= 1"),
        ("steps=true", "steps=true: must be a whole number >= 1"),
        ("steps=null", "steps=null: must be a whole number >= 1"),
        ("steps=[3]", "steps=[3]: must be a whole number >= 1"),
        ("generation.temperature=warm", "generation.temperature=warm: must be a number >= 0"),
        ("generation.temperature=nan", "generation.temperature=nan: must be a number >= 0"),
        ("dataset.shuffle=maybe", "dataset.shuffle=maybe: must be true or false"),
        ("dataset.path=[a]", "dataset.path=[a]: must be text that is not empty"),
        (
            "launcher=inlin",
            "launcher=inlin: must be one of local, inline, external, slurm, ray. Did you mean 'inline'?",
        ),
        ("models.actor.backend=megatro", "must be one of native, megatron, deepspeed. Did you mean 'megatron'?"),
        ("models.actor.optimizer.zero_stage=4", "zero_stage=4: must be a whole number >= 0 and <= 3 or null"),
        ("generation.stop_ids=[1,x]", "generation.stop_ids=[1,x]: must be a list [a,b,...], each a whole number >= 0"),
        ("generation.stop_ids=3", "generation.stop_ids=3: must be a list"),
        ("track=tensorboard", "track=tensorboard: must be a list [a,b,...], each one of tensorboard, wandb"),
        ("models.actor.optimizer.betas=[0.9]", "must be two values [a,b], each a number >= 0 and < 1"),
        ("models.actor.optimizer.betas=[0.9,2]", "must be two values [a,b], each a number >= 0 and < 1"),
        ("n_mbs=x", "n_mbs=x: must be a whole number >= 1 or null"),
        # impossible values
        ("steps=-3", "steps=-3: must be a whole number >= 1"),
        ("n_seqs=0", "n_seqs=0: must be a whole number >= 1"),
        ("generation.temperature=-1", "generation.temperature=-1: must be a number >= 0"),
        ("generation.top_p=0", "generation.top_p=0: must be a number > 0 and <= 1"),
        ("models.actor.optimizer.lr=0", "models.actor.optimizer.lr=0: must be a number > 0"),
        ("algorithm.beta=1", "algorithm.beta=1: must be a number > 0 and < 1"),
        ("algorithm.weights.a=x", "algorithm.weights.a=x: must be a mapping {name: value}, each value a number"),
        ("models.actor.path=", "models.actor.path=: must be text that is not empty"),
        # between keys
        ("generation.min_new_tokens=40", "generation: min_new_tokens=40 is more than max_new_tokens=32"),
        ("n_seqs=30", "n_seqs=30: must be a multiple of algorithm.n_minibatches=4, such as 28"),
        ("n_seqs=3", "n_seqs=3: must be a multiple of algorithm.n_minibatches=4, such as 4"),
        # malformed overrides
        ("steps", "steps: not an override; write it as steps=VALUE"),
        ("=3", "=3: the key is missing; write KEY=VALUE"),
        ("steps =3", "steps =3: no spaces around '='; write steps=3"),
        ("track=[a", "track=[a: a bracket is not closed"),
        ("run_dir=a&b", "run_dir=a&b: not a valid value; quote text with special characters: run_dir='\"a&b\"'"),
        ("run_dir=~/x", "run_dir=~/x: the shell did not expand ~; write the whole path, or $HOME"),
        ("steps=1,2", "steps=1,2: several values, but this is one run; --sweep makes a run of each"),
        ("a@b=c", "a@b=c: packages (@) cannot be chosen; write KEY=VALUE"),
        ("run_dir=${nope}", "run_dir=${nope}: Interpolation key 'nope' not found"),
        ("generation.stop_ids=['${nope}']", "Interpolation key 'nope' not found"),
        # groups
        ("preset=tiny", "preset=tiny: no such preset; there is none to choose from"),
        ("cluster=x", "cluster=x: no such cluster; there is none to choose from"),
        (
            "models.actor=x",
            "models.actor=x: no such model; there is none to choose from. A folder is given by models.a",
        ),
    ],
)
def test_message(override: str, message: str) -> None:
    assert message in errors(override)


def test_options_of_groups_are_offered(tmp_path: Path) -> None:
    for name in ("preset/tiny", "preset/quick", "cluster/pair"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text("{}\n")
    text = errors("preset=tny", config_dir=tmp_path)
    assert "preset=tny: no such preset; choose from quick, tiny. Did you mean 'tiny'?" in text
    assert "cluster=piar: no such cluster; choose from pair. Did you mean 'pair'?" in errors(
        "cluster=piar", config_dir=tmp_path
    )


def test_micro_batching_is_given_once() -> None:
    text = errors("n_mbs=2", "max_tokens_per_mb=100")
    assert "max_tokens_per_mb=100: n_mbs=2 is given too; micro-batches follow one of them" in text


def test_inline_needs_a_single_device() -> None:
    text = errors("launcher=inline", "cluster.n_devices_per_node=2")
    assert "launcher=inline: one process cannot run the 2 workers" in text
    assert "use launcher=local, or one device" in text


def test_several_errors_are_listed_together_on_one_screen() -> None:
    text = errors("steps=-1", "stepz=3", "seed", "launcher=x", "algorithm.beta=7")
    lines = text.splitlines()
    assert lines[0] == "5 things are wrong with the configuration:"
    assert len(lines) == 7
    many = errors(*(f"unknown_{i}=1" for i in range(40))).splitlines()
    assert many[0] == "40 things are wrong with the configuration:"
    assert many[11] == "  ... and 30 more"
    assert len(many) == 13


def test_a_long_value_is_cut() -> None:
    text = errors("steps=" + "x" * 500)
    assert max(len(line) for line in text.splitlines()) < 160


def test_an_option_without_default_must_be_given() -> None:
    class Needy(Section):
        beta: float = Field(gt=0, description="no default")

    demo = experiment(options=Needy)
    with pytest.raises(ConfigError, match=r"algorithm\.beta: has no default; give it: algorithm\.beta=VALUE"):
        compose(demo)
    assert compose(demo, ["algorithm.beta=2"]).algorithm.beta == 2.0


def test_python_code_is_checked_as_the_command_line_is() -> None:
    with pytest.raises(ValueError, match="numbers"):
        RunConfig(experiment="demo", steps=True)
    with pytest.raises(ValueError, match="Extra inputs"):
        RunConfig.model_validate({"experiment": "demo", "stepz": 3})
    with pytest.raises(ValueError, match="greater than 0"):
        Options(beta=0.0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.path=a.jsonl", "dataset.files.b=b.jsonl"], "dataset.path=a.jsonl: dataset.files names b too"),
        (["dataset.files.a=a.jsonl", "dataset.files.b={path: b.jsonl, weight: 2}"],
         "dataset.files.a: has no weight, and b has one; give it to all files or to none"),
        (["dataset.files={a-b: x.jsonl}"], "dataset.files.a-b: a name has letters, digits and _ only"),
        (["dataset.files.a.weight=2"], "dataset.files.a.path: has no default; give it"),
        (["dataset.files.a={path: x.jsonl, weight: 0}"], "dataset.files.a.weight=0: must be a number > 0"),
        (["dataset.fields.promt=x"], "dataset.fields.promt=x: unknown key. Did you mean 'dataset.fields.prompt'"),
        (["dataset.files.a={path: x.jsonl, fields: {promt: x}}"], "dataset.files.a.fields.promt"),
    ],
)  # fmt: skip
def test_contradictions_about_data(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(load_experiment("sft"), overrides)
    assert message in str(caught.value)
