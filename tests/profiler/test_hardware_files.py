import json

import pytest

from realrl.config.compose import compose
from realrl.errors import ConfigError
from realrl.experiment.discovery import load_experiment
from realrl.profiler.hardware_files import hardware_names, hardware_text, lengths_of, named_hardware

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
        ("a.yaml", b"a: [", "the file is no YAML"),
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
