"""Files of raw measurements: what is written is read, and what cannot be used is refused."""

from dataclasses import asdict

import msgspec
import pytest

from realrl import cli
from realrl.errors import UsageError
from realrl.plan.memory.formulas.local import Kernels
from realrl.profiler.hardware_files import named_hardware
from realrl.profiler.machine import Machine
from realrl.profiler.measurements import Measurements, read_measurements
from realrl.sim.fit import Measured
from realrl.sim.probes import Probe
from tests.sim.costs.models import small

MACHINE = Machine("a processor", "cpu", 8 * 10**9, asdict(Kernels(generation_bytes=4)))


def measurements(name="actor", *, n_workers=2, scale=1.0, **shape):
    passes = [
        Measured(Probe("inference", name, 8, n, 32, 16), scale * (0.002 + 0.001 * n)) for n in (1, 2, 4, 8, 16, 32)
    ]
    copies = [Measured(Probe("copies", n_bytes=n << 24), scale * 0.002 * n) for n in (1, 2, 4, 8)]
    model = small(dtype="float32", **shape)
    return Measurements("ppo", MACHINE, n_workers, {name: model}, 1e-4, 2e-4, 3.0, [*copies, *passes])


def write(path, found):
    path.write_bytes(found.encoded())
    return str(path)


def test_what_is_written_is_read(tmp_path):
    found = measurements(sliding_window=8, windowed_layers=(0, 3))
    again = read_measurements([write(tmp_path / "a.json", found)])
    assert again.measured == found.measured
    assert again.models == found.models
    assert again.machine.kernels["generation_bytes"] is None  # the model's own


def test_models_of_two_dtypes_that_generate_in_their_own_come_together(tmp_path):
    first, second = measurements(), measurements()
    half = Machine("a processor", "cpu", 8 * 10**9, asdict(Kernels(generation_bytes=2)))
    second = msgspec.structs.replace(second, models={"actor": small()}, machine=half)
    found = read_measurements([write(tmp_path / "a.json", first), write(tmp_path / "b.json", second)])
    assert [model.dtype for model in found.models.values()] == ["float32", "bfloat16"]


def test_models_of_several_files_come_together(tmp_path):
    first, second = measurements(), measurements(n_layers=4, scale=2.0)
    both = read_measurements([write(tmp_path / "a.json", first), write(tmp_path / "b.json", second)])
    assert both.models == {"actor": first.models["actor"], "actor_2": second.models["actor"]}
    assert [one.seconds for one in both.measured if one.probe.kind == "copies"] == [0.002, 0.004, 0.008, 0.016]
    assert {one.probe.model for one in both.measured} == {"", "actor", "actor_2"}
    assert len(both.measured) == 4 + 6 + 6


def test_one_file_for_two_models_by_the_command_line(tmp_path, capsys):
    paths = [write(tmp_path / "a.json", measurements()), write(tmp_path / "b.json", measurements(n_layers=4))]
    out = tmp_path / "both.yaml"
    arguments = [word for path in paths for word in ("--from", path)]
    assert cli.main(["profile", "ppo", *arguments, "--out", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    profile = named_hardware(str(out)).profile
    assert profile.models == ("actor", "actor_2")
    assert {kind: error.n_points for kind, error in profile.errors.items()} == {"inference": 12, "copies": 4}
    assert (
        "Not measured here either: products, train_step, generate, collectives, reallocs, rows, calls, rewards."
        in out.read_text()
    )


def test_what_cannot_be_used_is_refused(tmp_path, capsys):
    (tmp_path / "d.json").write_bytes(measurements().encoded().replace(b'"fused_norms"', b'"fused_forms"'))
    good, other = write(tmp_path / "a.json", measurements()), write(tmp_path / "b.json", measurements(n_workers=1))
    (tmp_path / "c.json").write_text('{"experiment": 1}')

    def refused(*arguments):
        assert cli.main(["profile", "ppo", *arguments, "--out", str(tmp_path / "x.yaml")]) == UsageError.exit_code
        assert not (tmp_path / "x.yaml").exists()
        return capsys.readouterr().err

    assert "none.json cannot be read: No such file" in refused("--from", str(tmp_path / "none.json"))
    assert "c.json holds no measurements: Expected `str`, got `int`" in refused("--from", str(tmp_path / "c.json"))
    assert "d.json holds no measurements: " in refused("--from", str(tmp_path / "d.json"))
    told = refused("--from", good, "--from", other)
    assert "b.json is of 1 x a processor, and" in told
    assert "of 2 x a processor" in told


@pytest.mark.parametrize("option", ["--out", "--measurements"])
def test_files_that_cannot_be_written_are_refused_before_anything_starts(option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["profile", "ppo", "preset=tiny", option, "none/a"]) == UsageError.exit_code
    assert f"{option} none/a: its folder does not exist" in capsys.readouterr().err
