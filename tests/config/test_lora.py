"""Keys of adapters, and roles that a configuration makes superfluous."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from realrl.cli.unused import unused_keys
from realrl.config.compose import compose
from realrl.config.keys import known_keys
from realrl.config.schema import RunConfig
from realrl.errors import ConfigError
from realrl.experiment.declaration import Experiment, Role
from tests.config.declared import experiment


def without_ref(config: RunConfig) -> Mapping[str, Role | None]:
    return {"ref": None} if config.models["actor"].lora.rank else {}


def adaptable() -> Experiment:
    def mfcs(config: RunConfig) -> list[object]:
        calls = list(experiment().calls(config))
        return [mfc for mfc in calls if mfc.role in adaptable().roles_for(config)]

    return experiment(role_changes=without_ref, mfcs=mfcs)


def test_keys_of_trainable_roles() -> None:
    lora = (
        compose(experiment(), ["models.actor.lora.rank=4", "models.actor.lora.targets=[q_proj,v]"]).models["actor"].lora
    )
    assert (lora.rank, lora.alpha, lora.targets) == (4, 16.0, ("q_proj", "v"))
    assert compose(experiment()).models["actor"].lora.rank == 0
    assert {path for path in known_keys(experiment()) if ".lora." in path} == {
        "models.actor.lora.rank",
        "models.actor.lora.alpha",
        "models.actor.lora.targets",
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models.ref.lora.rank=4", "role 'ref' is frozen: it is not trained and has no lora"),
        ("models.actor.lora.rank=-1", r"models\.actor\.lora\.rank=-1: must be a whole number >= 0"),
        ("models.actor.lora.alpha=0", r"models\.actor\.lora\.alpha=0: must be a number > 0"),
        ("models.actor.lora.targets=[]", r"models\.actor\.lora\.targets=\[\]: must be"),
        ("models.actor.lora.rnak=4", r"Did you mean 'models\.actor\.lora\.rank'"),
    ],
)
def test_impossible_adapters(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(experiment(), [override])


def test_a_role_that_a_configuration_does_without() -> None:
    demo = adaptable()
    assert list(compose(demo).models) == ["actor", "ref"]
    config = compose(demo, ["models.actor.lora.rank=2", "models.actor.path=/a"])
    assert list(config.models) == list(demo.roles_for(config)) == ["actor"]
    assert config.models["actor"].path == "/a"
    assert "models.ref" not in unused_keys(demo, demo.calls(compose(demo)))
    assert unused_keys(demo, demo.calls(config))["models.ref"] == "this run of 'demo' needs no role 'ref'"
