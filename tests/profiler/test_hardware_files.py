import json
from itertools import pairwise

import pytest

from realrl.config.compose import compose
from realrl.errors import ConfigError
from realrl.experiment.discovery import load_experiment
from realrl.profiler.hardware_files import (
    hardware_like,
    hardware_names,
    hardware_text,
    lengths_of,
    named_hardware,
)

CONFIG = compose(load_experiment("ppo"), ["dataset.max_prompt_tokens=64", "generation.max_new_tokens=100"])


def test_names_are_those_of_the_repository():
    assert {"a100_80gb", "h100", "h200", "l40s", "two_cores"} <= set(hardware_names())
    assert named_hardware("h200").device.memory_bytes == 141e9


def test_what_is_written_can_be_read(tmp_path):
    path = tmp_path / "ours.yaml"
    path.write_text(hardware_text(named_hardware("l40s"), ["of a test"]))
    assert named_hardware(str(path)) == named_hardware("l40s")


@pytest.mark.parametrize(
    ("reference", "content", "message"),
    [
        ("h20", None, r"--hardware h20: there is no such hardware. Did you mean 'h200'.*a100_80gb.*realrl profile"),
        ("none.yaml", None, r"cannot be read: No such file.*or one of a100_80gb, h100"),
        ("a.yaml", b"\xff\xfe", "no text in UTF-8"),
        ("a.yaml", b"a: 1\nb: [", "the file is no YAML: .* in line 2"),
        ("a.yaml", b"- 1", "is no mapping"),
        ("a.yaml", b"# " + 100_000 * b"x", "more than 100,000 bytes"),
    ],
)
def test_what_is_no_hardware_is_refused(tmp_path, monkeypatch, reference, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / reference).write_bytes(content)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        named_hardware(reference)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "a.yaml").mkdir()
    with pytest.raises(ConfigError, match="it is a folder"):
        named_hardware(str(tmp_path / "a.yaml"))


def test_lengths_are_distributions_or_recorded(tmp_path):
    lengths = lengths_of("prompt=fixed:32 response=normal:60,5", CONFIG)
    assert lengths.prompts.values == (32.0,)
    path = tmp_path / "generations.jsonl"
    path.write_text("".join(json.dumps({"response_tokens": n}) + "\n" for n in (10, 20, 30)))
    recorded = lengths_of(str(path), CONFIG)
    assert recorded.responses.values == (10.0, 20.0, 30.0)
    assert recorded.prompts.values == (64.0,)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("prompt=fixed:32", "the lengths of responses are missing"),
        ("prompt=fixed:32 response=normal:500,5", r"exceed generation.max_new_tokens=100"),
        ("runs/none.jsonl", "cannot be read: No such file"),
    ],
)
def test_what_is_no_lengths_is_refused(wanted, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        lengths_of(wanted, CONFIG)


def test_a_file_that_explodes_is_refused(tmp_path):
    bomb = ["a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
    bomb += [f"{name}: &{name} [{', '.join(9 * ['*' + before])}]" for before, name in pairwise("abcdefghij")]
    (tmp_path / "a.yaml").write_text("\n".join(bomb))
    with pytest.raises(ConfigError, match="more than 10,000 values with aliases written out"):
        named_hardware(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("NVIDIA A100-SXM4-40GB", ""),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", ""),
        ("NVIDIA GH200 480GB", ""),
        ("", ""),
    ],
)
def test_the_file_of_a_device(device, name):
    assert hardware_like(device) == name
