"""config.json: what is written is what is read."""

from __future__ import annotations

import json

import pytest

from realrl.config.compose import compose
from realrl.config.serialize import (
    changed_settings,
    dump_config,
    experiment_reference,
    load_config,
    recorded_config,
    with_paths_of,
)
from realrl.errors import ConfigError
from tests.config.declared import Options, experiment


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["models.actor.path=/a", "generation.stop_ids=[1,2]", "n_mbs=3", "track=[wandb]", "algorithm.limit=0.3"],
        ["algorithm.weights={a: 0.1}", "models.actor.optimizer.lr=3.3333333333333335e-5", "run_dir='a \"b\"'"],
    ],
)
def test_a_dumped_configuration_loads_back_identically(overrides: list[str]) -> None:
    config = compose(experiment(), overrides, reference="/some/where.py")
    data = dump_config(config)
    loaded = load_config(data, experiment())
    assert loaded == config
    assert type(loaded.algorithm) is Options
    assert dump_config(loaded) == data
    assert experiment_reference(data) == "/some/where.py"


def test_the_file_is_readable() -> None:
    values = json.loads(dump_config(compose(experiment(), ["steps=3"])))
    assert values["steps"] == 3
    assert values["algorithm"]["inner"] == {"width": 3}
    assert set(values["models"]) == {"actor", "ref"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "is not JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"steps": 1}', "must name its experiment"),
    ],
)
def test_data_that_is_no_configuration(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment_reference(data)


def test_edited_data_is_checked() -> None:
    data = dump_config(compose(experiment())).replace(b'"steps": 10', b'"steps": -10')
    with pytest.raises(ConfigError, match="steps=-10: must be a whole number >= 1"):
        load_config(data, experiment())
    data = dump_config(compose(experiment())).replace(b'"beta"', b'"bta"')
    with pytest.raises(ConfigError, match=r"algorithm\.bta"):
        load_config(data, experiment())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {}),
        (("steps=99", "save.keep=7", "run_dir=elsewhere", "cluster.n_devices_per_node=2", "show=[a/b]"), {}),
        (("seed=2", "algorithm.limit=0.3"), {"seed": (1, 2), "algorithm.limit": (0.1, 0.3)}),
        (("algorithm.weights={b: 0.5}",), {"algorithm.weights.a": (0.1, None), "algorithm.weights.b": (None, 0.5)}),
    ],
)
def test_settings_that_changed_since_a_run_was_recorded(overrides, expected) -> None:  # type: ignore[no-untyped-def]
    weights = "algorithm.weights={a: 0.1}"
    recorded = recorded_config(compose(experiment(), ["algorithm.limit=0.1", weights]), "/home/me")
    words = ["algorithm.limit=0.1", *([weights] if "weights" not in "".join(overrides) else []), *overrides]
    assert changed_settings(recorded, compose(experiment(), words)) == expected


def test_what_a_run_records_loads_from_any_folder() -> None:
    overrides = ["models.actor.path=nets/a", "dataset.path=../rows.jsonl", "algorithm.weights={a: 0.1}"]
    config = compose(experiment(), overrides, reference="/some/where.py")
    data = recorded_config(config, "/home/me/lab")
    assert load_config(data, experiment()) == config
    resolved = load_config(with_paths_of(data), experiment())
    assert resolved.models["actor"].path == "/home/me/lab/nets/a"
    assert resolved.dataset.path == "/home/me/rows.jsonl"
    assert with_paths_of(dump_config(config)) == dump_config(config)  # which names no folder
    built_in = recorded_config(compose(experiment(), []), "/home/me/lab")
    assert load_config(with_paths_of(built_in), experiment()) == compose(experiment(), [])
    named = json.loads(data) | {"algorithm": {"f": "mine.py:score", "g": "a.module:score", "h": "/x/mine.py:score"}}
    found = json.loads(with_paths_of(json.dumps(named).encode()))["algorithm"]
    assert found == {"f": "/home/me/lab/mine.py:score", "g": "a.module:score", "h": "/x/mine.py:score"}
