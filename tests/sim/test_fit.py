from dataclasses import replace

import numpy as np
import pytest
import yaml

from realrl.errors import ConfigError
from realrl.plan.memory.formulas.local import Kernels
from realrl.profiler.hardware_files import hardware_text
from realrl.sim.fit import LEAST_POINTS, Measured, fit, least_squares
from realrl.sim.hardware import Link, hardware_from
from realrl.sim.probes import Bench, Probe, cut_to, seconds_of
from tests.sim.costs.models import hardware, llama

MODEL = llama(n_layers=12, hidden_size=512, n_heads=8, n_kv_heads=4, head_dim=64, intermediate_size=1536)
BENCH = Bench({"actor": MODEL}, 2, Kernels(generation_bytes=4))  # trains in bfloat16, generates in float32
TRUE = hardware()
TRUE = replace(
    TRUE,
    device=replace(
        TRUE.device,
        kind="cpu",
        flops_per_s={"bfloat16": 4e11, "float32": 2e11},
        efficiency=1.0,
        bytes_per_s=2e10,
        memory_efficiency=1.0,
        activation_efficiency=0.25,
        size_s=8e-3,
        fork_s=1e-3,
        alone=1.5,
        half_tokens=20.0,
        attention_efficiency=0.25,
        backward_slowdown=1.3,
        tensor_s=1e-4,
        block_s=4e-4,
        pass_s=3e-3,
        token_s=1e-3,
        generation={"block_s": 5e-5, "pass_s": 1e-3, "half_tokens": 3.0, "attention_efficiency": 0.5},
    ),
    links=replace(TRUE.links, device=Link(1e-4, 3e9, 1.0), host=Link(2e-5, 8e9, 1.0)),
    host=replace(
        TRUE.host,
        socket_bytes_per_s=6e8,
        pull_s=1.5e-3,
        row_s=4e-5,
        call_s=2e-3,
        sample_s=3e-5,
        reward_s=5e-4,
        pool_s=4e-3,
    ),
)
BASE = hardware("two_cores")
BASE = replace(BASE, host=replace(BASE.host, message_s=TRUE.host.message_s))


def probes():
    sizes = [(n, p, r) for n in (1, 2, 4, 8, 16, 32) for p, r in ((16, 8), (64, 32), (256, 128))]
    yield from (Probe("products", "actor", 12, 1, n) for n in (1, 4, 16, 64, 256, 1024))
    for depth in (12, 4):
        yield from (Probe("inference", "actor", depth, *size) for size in sizes)
        yield from (Probe("train_step", "actor", depth, *size) for size in sizes)
        yield from (Probe("inference", "actor", depth, *size, is_new=True) for size in sizes[::3])
        yield from (Probe("train_step", "actor", depth, *size, is_new=True) for size in sizes[::3])
        yield from (Probe("train_step", "actor", depth, *size, is_alone=True) for size in sizes[1::4])
        yield from (Probe("generate", "actor", depth, n, p, r) for n in (1, 4, 16, 64) for p, r in ((16, 2), (64, 48)))
        yield from (Probe("generate", "actor", depth, n, 512, 4) for n in (1, 4, 16))
    for n in (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 24):
        yield from (Probe("collectives", way=way, n_bytes=n) for way in ("all_reduce", "all_gather", "send"))
        yield Probe("copies", n_bytes=8 * n)
        yield Probe("rows", n_sequences=1, n_bytes=n)
    yield from (Probe("reallocs", "actor", n) for n in (1, 2, 3, 4, 6, 8))
    for n in (1, 4, 16, 64, 256):
        yield Probe("rows", n_sequences=n, n_bytes=n << 10)
        yield Probe("calls", n_sequences=n, prompt_tokens=16, response_tokens=8)
        yield Probe("rewards", n_sequences=4 * n, prompt_tokens=16, response_tokens=8, n_alike=4)
    for depth in (12, 4):
        yield from (Probe(kind, "actor", depth, n, 16, 8, 8) for kind in ("inference", "train_step") for n in (8, 32))


def measured(noise=0.0, seed=0):
    found = list(probes())
    seconds = seconds_of(found, TRUE, BENCH)
    spoiled = seconds * np.exp(noise * np.random.default_rng(seed).standard_normal(len(found)))
    return [Measured(probe, s) for probe, s in zip(found, spoiled.tolist(), strict=True)]


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.03), (0.03, 0.15)])
def test_parameters_are_recovered(noise, tolerance):
    found = fit(measured(noise), BENCH, BASE)
    close = {"rel": tolerance}
    for dtype, rate in TRUE.device.flops_per_s.items():
        assert found.device.rate(dtype) == pytest.approx(rate, **close)
    names = (
        "half_tokens",
        "activation_efficiency",
        "attention_efficiency",
        "backward_slowdown",
        "bytes_per_s",
        "alone",
    )
    for name in names:
        assert getattr(found.device, name) == pytest.approx(getattr(TRUE.device, name), **close), name
    assert _overheads(found.device)[0] == pytest.approx(_overheads(TRUE.device)[0], **close)
    assert found.device.tensor_s == pytest.approx(TRUE.device.tensor_s, rel=0.3 if noise else 0.03)
    assert found.device.size_s == pytest.approx(TRUE.device.size_s, rel=0.2)
    assert found.device.fork_s == pytest.approx(TRUE.device.fork_s, rel=0.5 if noise else 0.1)
    if not noise:  # overheads of generation are a hundredth of its shortest probes
        assert _overheads(found.device.generating) == pytest.approx(_overheads(TRUE.device.generating), rel=0.2)
    for link in ("device", "host"):
        ours, true = getattr(found.links, link), getattr(TRUE.links, link)
        assert (ours.latency_s, ours.speed()) == pytest.approx((true.latency_s, true.speed()), **close)
    for name in ("socket_bytes_per_s", "pull_s", "row_s", "call_s", "sample_s", "reward_s", "pool_s"):
        assert getattr(found.host, name) == pytest.approx(getattr(TRUE.host, name), **close), name


def _overheads(device):
    return 12 * device.block_s + device.pass_s, 12 * device.block_s + device.token_s


@pytest.mark.slow
def test_a_machine_that_is_now_and_then_slow_is_fitted_as_if_it_were_not():
    points = measured(noise=0.02)
    spoiled = [replace(one, seconds=one.seconds * (1.6 if i % 9 == 4 else 1)) for i, one in enumerate(points)]
    usual, found = (fit(some, BENCH, BASE) for some in (points, spoiled))
    for dtype in TRUE.device.flops_per_s:
        assert found.device.rate(dtype) == pytest.approx(usual.device.rate(dtype), rel=0.06)


def test_a_third_is_held_out_and_errors_are_as_large_as_the_noise():
    profile = fit(measured(noise=0.03), BENCH, BASE).profile
    assert profile.n_workers == 2
    assert profile.models == ("actor",)
    assert set(profile.errors) == {probe.kind for probe in probes()}
    for error in profile.errors.values():
        assert 0.2 <= error.n_held_out / error.n_points <= 0.4
        assert error.median <= error.worst < 0.15


def test_errors_of_held_out_sizes_show_a_form_that_does_not_fit():
    spoiled = [
        replace(one, seconds=one.seconds * (4 if one.probe.n_sequences in (2, 8) else 1)) if one.probe.model else one
        for one in measured()
    ]
    errors = fit(spoiled, BENCH, BASE).profile.errors
    assert errors["inference"].worst > 0.3
    assert errors["collectives"].worst < 0.02


def test_a_written_file_gives_what_was_measured_up_to_its_own_error():
    points = measured(noise=0.05)
    text = hardware_text(fit(points, BENCH, BASE), ["a note"])
    assert text.startswith("# a note\nname: ")
    found = hardware_from(yaml.safe_load(text), source="hardware.yaml")
    predicted = seconds_of([one.probe for one in points], found, BENCH)
    for one, seconds in zip(points, predicted.tolist(), strict=True):
        assert abs(seconds / one.seconds - 1) <= found.profile.errors[one.probe.kind].bound, str(one.probe)


def test_classes_without_measurements_keep_what_they_were():
    found = fit([one for one in measured() if one.probe.kind == "copies"], BENCH, BASE)
    assert set(found.profile.errors) == {"copies"}
    assert found.links.device.speed() == BASE.links.device.bytes_per_s * BASE.links.device.efficiency
    assert found.device.block_s == BASE.device.block_s
    assert found.host.disk_bytes_per_s == BASE.host.disk_bytes_per_s


def test_scatter_is_the_mean_of_calls_that_tell_it():
    points = measured()
    assert fit(points, BENCH, BASE).device.scatter == BASE.device.scatter == 0.0
    of = {"inference": 0.1, "train_step": 0.2, "products": 0.9}
    points = [replace(one, scatter=of.get(one.probe.kind, 0.0)) for one in points]
    n = [sum(one.probe.kind == kind for one in points) for kind in ("inference", "train_step")]
    found = fit(points, BENCH, BASE)
    assert found.device.scatter == pytest.approx((0.1 * n[0] + 0.2 * n[1]) / sum(n), rel=1e-3)
    assert hardware_from(yaml.safe_load(hardware_text(found, ())), source="a") == found


def test_too_few_points_are_refused():
    points = [one for one in measured() if one.probe.kind != "copies"]
    copies = [one for one in measured() if one.probe.kind == "copies"][: LEAST_POINTS - 1]
    with pytest.raises(ConfigError, match=r"(?s)3 measurements of copies cannot be fitted, it takes 4.*more sizes"):
        fit([*points, *copies], BENCH, BASE)


def test_no_time_is_refused():
    with pytest.raises(ConfigError, match="a measurement of copies took no time"):
        fit([Measured(Probe("copies", n_bytes=n), 0.0) for n in range(1, 6)], BENCH, BASE)


def test_least_squares_of_a_curve():
    x = np.linspace(0.1, 3, 20)
    y = 2.0 * np.exp(-1.5 * x)
    found = least_squares(lambda v: v[0] * np.exp(v[1] * x) - y, np.array([0.5, -0.1]))
    assert found == pytest.approx([2.0, -1.5], rel=1e-4)


def test_a_model_is_cut_with_its_windows_and_experts():
    model = llama(n_layers=8, sliding_window=16, windowed_layers=(0, 2, 5))
    assert cut_to(model, 3).windowed_layers == (0, 2)
    assert cut_to(model, 3).n_layers == 3
