import copy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from realrl.errors import ConfigError
from realrl.sim.hardware import FitError, Hardware, Link, Profile, hardware_from, hardware_mapping, parse_quantity

FOLDER = Path(__file__).parents[2] / "configs" / "hardware"
A100 = yaml.safe_load((FOLDER / "a100_80gb.yaml").read_text())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_of_the_repository_is_hardware(path):
    hardware = hardware_from(yaml.safe_load(path.read_text()), source=path.name)
    assert isinstance(hardware, Hardware)
    assert hardware.device.stream <= hardware.device.bytes_per_s
    assert all(hardware.device.rate(dtype) <= peak for dtype, peak in hardware.device.flops_per_s.items())


def test_gpus_have_one_set_of_assumptions():
    names = ("efficiency", "half_tokens", "attention_efficiency", "memory_efficiency", "block_s", "pass_s", "token_s")
    gpus = [yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in ("a100_80gb", "h100", "h200", "l40s")]
    assert len({tuple(gpu["device"][name] for name in names) for gpu in gpus}) == 1


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("300 GB/s", "B/s", 3e11),
        ("200 Gb/s", "B/s", 2.5e10),
        ("312 TFLOP/s", "FLOP/s", 3.12e14),
        ("5 us", "s", 5e-6),
        ("5µs", "s", 5e-6),
        ("80 GB", "B", 8e10),
        ("1 GiB", "B", 2.0**30),
        ("3e11", "B/s", 3e11),
        (0.25, "", 0.25),
        ("300 GB", "B/s", None),
        ("5 us", "B/s", None),
        ("5 parsecs", "s", None),
        ("nan", "s", None),
        (float("inf"), "s", None),
        (10**400, "B", None),
        (True, "s", None),
        (None, "s", None),
        ([1], "s", None),
    ],
)
def test_quantities(text, unit, value):
    found = parse_quantity(text, unit)
    assert found is None if value is None else found == pytest.approx(value)


def broken(path, value):
    mapping = copy.deepcopy(A100)
    *parents, last = path.split(".")
    part = mapping
    for name in parents:
        part = part[name]
    if value is KeyError:
        del part[last]
    else:
        part[last] = value
    return mapping


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("links.node.latency_s", "-5 us", r"links\.node\.latency_s='-5 us' is negative"),
        (
            "links.node.latency_s",
            5000,
            r"latency_s=5000 is 5e\+03 s, and a time is 0 to 1\n  Write the unit .*'5 us'",
        ),
        (
            "links.device.bytes_per_s",
            300,
            r"bytes_per_s=300 is 300 B/s, and a bandwidth is .*\n  Write the unit .*GB/s",
        ),
        ("links.device.bytes_per_s", "300 GB", r"is no bandwidth\n  Write it like '300 GB/s'\. Its units are B/s"),
        (
            "device.flops_per_s.bfloat16",
            "312 GB/s",
            r"device\.flops_per_s\.bfloat16='312 GB/s' is no rate of computing",
        ),
        ("device.flops_per_s", {}, r"has no dtype"),
        ("device.flops_per_s.bf16", "1 TFLOP/s", r"no key device\.flops_per_s\.bf16\. Did you mean 'bfloat16'"),
        ("links.node.latency_s", 5, r"latency_s=5 is 5 s, and a time is 0 to 1\n  Write the unit .*'5 us'"),
        ("device.block_s", 50, r"device\.block_s=50 is 50 s, and a time is 0 to 1"),
        (
            "links.node.bytes_per_s",
            "20 TB/s",
            r"links\.node\.bytes_per_s is 2e\+13 B/s, more than device\.bytes_per_s, .*\n  .*Gb/s is bits",
        ),
        ("device.memory_bytes", "800 TB", r"give 392 s to be read once, and machines have 0\.001 to 100"),
        ("device.flops_per_s", {"bfloat16": "312 GFLOP/s"}, r"give 0\.153 FLOPs for each byte .* 0\.5 to 5000"),
        ("device.flops_per_s", {"bfloat16": "31 PFLOP/s"}, r"give 1\.52e\+04 FLOPs for each byte"),
        ("device.efficiency", 60, r"device\.efficiency is 60, and it is a share of a peak\n  Write 0\.6"),
        ("links.host.efficiency", 80, r"links\.host\.efficiency is 80, and it is a share"),
        ("links.device.latency_s", "4 ms", r"links\.device\.bytes_per_s give 1\.2e\+09 bytes under way"),
        ("device.efficiency", 600, r"device\.efficiency=600 is 600, and a number is 0\.01 to 100\n  Correct it"),
        ("device.kind", "tpu", r"device\.kind='tpu' is no kind of device\n  Use cuda or cpu"),
        ("device.memory_byte", 1, r"no key device\.memory_byte\. Did you mean 'memory_bytes'"),
        ("device.memory_bytes", KeyError, r"device\.memory_bytes is missing\n  Copy the key"),
        ("links.node.sharing", 0, r"links\.node\.sharing=0 is no number of network cards"),
        ("links.node", None, r"links\.node=None is no mapping\n  It has the keys latency_s"),
        ("name", "  ", r"name='  ' is no name"),
        ("host.reward_s", "fast", r"host\.reward_s='fast' is no time"),
    ],
)
def test_bad_files(path, value, message):
    mapping = broken(path, value)
    if message is None:
        assert hardware_from(mapping, source="x.yaml").device.efficiency == value
        return
    with pytest.raises(ConfigError, match=message) as caught:
        hardware_from(mapping, source="x.yaml")
    assert str(caught.value).startswith("x.yaml: ")


def test_a_file_that_is_no_mapping():
    with pytest.raises(ConfigError, match=r"x\.yaml: the file=\[1\] is no mapping"):
        hardware_from([1], source="x.yaml")


def test_a_dtype_without_a_peak():
    device = hardware_from(A100, source="a100").device
    with pytest.raises(ConfigError, match=r"no device\.flops_per_s\.float16.*\n  It has float32"):
        replace(device, flops_per_s={"float32": 1e12}).rate("float16")


def test_devices_share_the_cards_of_their_node():
    link = Link(1e-6, 1e9, 0.5, sharing=2)
    assert [link.speed(n) for n in (1, 2, 4)] == [5e8, 5e8, 2.5e8]
    assert replace(link, sharing=None).speed(8) == 5e8


PROFILED = A100 | {
    "profile": {
        "n_workers": 8,
        "models": ["actor"],
        "errors": {
            "inference": {"n_points": 9, "n_held_out": 3, "median": 0.04, "worst": 0.11, "worst_fitted": 0.2},
        },
    }
}


def test_a_profile_is_read_and_written_again():
    found = hardware_from(PROFILED, source="a.yaml")
    assert found.profile == Profile(8, ("actor",), {"inference": FitError(9, 3, 0.04, 0.11, 0.2)})
    assert found.profile.errors["inference"].bound == 0.2
    written = hardware_mapping(found)
    assert "generation" not in written["device"]
    assert "sharing" not in written["links"]["device"]
    assert hardware_from(written, source="b.yaml") == found
    assert hardware_from(hardware_mapping(hardware_from(A100, source="a.yaml")), source="b.yaml").profile is None


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("profile", "n_workers"), 0, "profile.n_workers=0 is no number of 1 or more"),
        (("profile", "models"), "actor", "profile.models='actor' is no list of models"),
        (("profile", "errors"), [], r"profile.errors=\[\] is no mapping"),
        (("profile", "errors", "inference", "median"), -1, "profile.errors.inference.median=-1 is no relative error"),
        (("profile", "errors", "inference", "n_points"), True, "n_points=True is no number of 1 or more"),
        (("device", "generation"), {"token_s": 1}, "there is no key device.generation.token_s"),
        (("device", "generation"), {"block_s": -1}, "device.generation.block_s=-1 is negative"),
    ],
)
def test_spoiled_profiles_are_refused(keys, value, message):
    spoiled = copy.deepcopy(PROFILED)
    section = spoiled
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    with pytest.raises(ConfigError, match=message):
        hardware_from(spoiled, source="a.yaml")


def test_generation_has_values_of_its_own():
    spoiled = copy.deepcopy(A100)
    spoiled["device"]["generation"] = {"block_s": "3 us", "efficiency": 0.3}
    device = hardware_from(spoiled, source="a.yaml").device
    assert device.generating.block_s == 3e-6
    assert device.generating.rate("bfloat16") == pytest.approx(device.rate("bfloat16") / 2)
    assert device.generating.pass_s == device.pass_s
    assert device.generating.generating is device.generating
