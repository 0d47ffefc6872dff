"""Files of plans: written, read again, and refused for anything else."""

import copy
import dataclasses

import pytest
import yaml

from realrl.config.compose import compose
from realrl.errors import ConfigError
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.planner.plan_file import check_holds, check_pins, holds_for, plan_text, read_plan
from realrl.shape import tiny_config
from tests.planner.test_settings import SETTINGS, composed

PPO = load_experiment("ppo")


def written(tmp_path, *, change=None):
    """A plan's file; `change` edits its content."""
    config = composed("cluster.device=cpu")
    models = {
        name: tiny_config(260, head=role.head) for name, role in PPO.roles_for(config).items() if role.head != "none"
    }
    holds = holds_for(config, PPO, PPO.calls(config), models)
    text = plan_text(SETTINGS, holds, {"method": "search", "period_s": 1.25}, ("A plan for ppo.", "", "Two lines."))
    if change is not None:
        content = yaml.safe_load(text)
        change(content)
        text = yaml.safe_dump(content)
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def reading(path):
    return read_plan(str(path), source=f"plan={path.name}")


def test_a_plan_is_read_as_it_was_written(tmp_path):
    path = written(tmp_path)
    assert path.read_text().startswith("# A plan for ppo.\n#\n# Two lines.\nsettings:")
    plan = reading(path)
    assert plan.settings == SETTINGS
    assert plan.made == {"method": "search", "period_s": 1.25}
    assert plan.holds_for["calls"]["rew_inf"]["writes"] == ["rewards"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c.pop("settings"), "the key 'settings' is missing"),
        (lambda c: c["holds_for"].pop("models"), "the key 'holds_for.models' is missing"),
        (lambda c: c["settings"].update(steps=5), "a plan has no key 'settings.steps'"),
        (lambda c: c.update(extra=1), "a plan has no key 'extra'"),
        (lambda c: c["settings"]["allocation"].update(mode="data"), "settings.allocation.mode=data: Input should be"),
        (lambda c: c["settings"]["calls"]["actor_train"].update(n_mbs=0), "settings.calls.actor_train.n_mbs=0"),
        (lambda c: c["settings"]["calls"]["actor_train"].update(n_mbs=True), "actor_train.n_mbs=true"),
        (lambda c: c["settings"]["models"]["actor"].update(path="x"), "no key 'settings.models.actor.path'"),
        (lambda c: c["settings"]["models"]["actor"]["optimizer"].update(zero_stage=4), "optimizer.zero_stage=4"),
        (lambda c: c["settings"]["allocation"].update(calls=["d1"]), "settings.allocation.calls="),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, change, told):
    with pytest.raises(ConfigError) as refused:
        reading(written(tmp_path, change=change))
    assert refused.value.message.startswith("plan=plan.yaml: ")
    assert told in refused.value.message


@pytest.mark.parametrize("text", ["settings: [", "- 1", "", "a: &a [*a]", "\0", "settings: {a: 1}\nsettings: {b: 2}"])
def test_damaged_files_are_refused(tmp_path, text):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^plan=plan\.yaml: "):
        reading(tmp_path / "plan.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read"):
        reading(tmp_path / "none.yaml")


def check(path, *overrides, experiment="ppo"):
    declared = load_experiment(experiment)
    arguments = ["preset=tiny", "cluster.n_devices_per_node=8", "cluster.device=cpu", *overrides]
    check_holds(reading(path), compose(declared, arguments, config_dir=config_dir()), declared)


def test_a_plan_holds_for_its_run_alone(tmp_path):
    path = written(tmp_path)
    check(path)
    check(path, "n_seqs=32", "generation.max_new_tokens=4", "models.actor.optimizer.lr=1e-4")

    def told(*overrides, **settings):
        with pytest.raises(ConfigError) as refused:
            check(path, *overrides, **settings)
        return str(refused.value)

    assert "is a plan for 'ppo', not for 'grpo'" in told(experiment="grpo")
    cluster = told("cluster.n_devices_per_node=4")
    assert "a plan for 1 node of 8 devices of type cpu, and this run has 1 node of 4 devices of type cpu" in cluster
    assert "Set cluster.n_devices_per_node=8" in cluster
    assert "and this run has 1 node of 8 devices of type cuda" in told("cluster.device=cuda")
    assert "a call 'ref_inf' with role=ref, and this run has actor" in told("models.actor.lora.rank=4")
    assert "a model of role 'critic' with lora_rank=null, and this run has 4" in told("models.critic.lora.rank=4")


def test_other_models_and_graphs(tmp_path):
    def larger(content):
        content["holds_for"]["models"]["critic"]["n_layers"] = 80

    def other_call(content):
        content["holds_for"]["calls"]["extra_inf"] = copy.deepcopy(content["holds_for"]["calls"]["rew_inf"])

    def other_keys(content):
        content["holds_for"]["calls"]["rew_inf"]["writes"] = ["scores"]

    def no_role(content):
        del content["holds_for"]["models"]["ref"]

    told = {}
    for change in (larger, other_call, other_keys, no_role):
        with pytest.raises(ConfigError) as refused:
            check(written(tmp_path, change=change))
        told[change.__name__] = refused.value.message
    assert "a model of role 'critic' with n_layers=80, and this run has " in told["larger"]
    assert "was made with a call 'extra_inf', and this run has none" in told["other_call"]
    assert "a call 'rew_inf' with writes=" in told["other_keys"]
    assert "was made without a model of role 'ref', and this run has one" in told["no_role"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda s: s["allocation"]["calls"].update(actor_gne="d1@0:0"),
            "settings.allocation.calls has 'actor_gne', and this run has no such call",
        ),
        (lambda s: s["allocation"]["calls"].pop("rew_inf"), "settings.allocation.calls.rew_inf is missing"),
        (
            lambda s: s["allocation"]["calls"].update(rew_inf="d2@0:7-8"),
            "settings.allocation.calls.rew_inf: mesh '0:7-8' lies outside the cluster",
        ),
        (
            lambda s: s["allocation"]["calls"].update(rew_inf="d1"),
            "settings.allocation.calls.rew_inf: allocation 'd1' has no '@' and mesh",
        ),
        (lambda s: s["calls"].update(ref_gen={"n_mbs": 2}), "settings.calls has 'ref_gen'"),
        (
            lambda s: s["models"].update(ref={"activation_checkpointing": True}),
            "settings.models has 'ref', and this run has no such role that is trained",
        ),
        (lambda s: s["allocation"].update(offload=["rf"]), "settings.allocation.offload has 'rf', and this run has no"),
        (lambda s: s["allocation"].update(fuse=["actor_trian"]), "settings.allocation.fuse has 'actor_trian'"),
    ],
)
def test_settings_that_a_run_cannot_have_are_refused(tmp_path, change, told):
    with pytest.raises(ConfigError) as refused:
        check(written(tmp_path, change=lambda content: change(content["settings"])))
    assert refused.value.message.startswith(f"plan=plan.yaml: {told}")
    assert refused.value.remedy


def test_a_pair_is_read_from_a_file(tmp_path):
    def fuse(content):
        content["settings"]["allocation"]["fuse"] = ["actor_train", "critic_train"]

    plan = reading(written(tmp_path, change=fuse))
    assert plan.settings == dataclasses.replace(SETTINGS, fuse=("actor_train", "critic_train"))
    assert plan.layer["allocation"]["fuse"] == ["actor_train", "critic_train"]
    assert plan.settings.applied(composed()).allocation.fuse == ("actor_train", "critic_train")


def test_pins_are_compared_with_a_plan(tmp_path):
    plan = reading(written(tmp_path))
    for pin in ("rew_inf=d1@0:4", "actor_gen=t2d2", "actor_gen=d2t2p1@0:0-3"):
        check_pins(plan, composed(f"allocation.calls.{pin}"))
    for pin in ("rew_inf=d1@0:5", "actor_gen=d4"):
        with pytest.raises(ConfigError, match=rf"plan.yaml has .* not allocation\.calls\.{pin}"):
            check_pins(plan, composed(f"allocation.calls.{pin}"))
