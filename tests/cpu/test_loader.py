import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from realrl.cpu import loader
from realrl.cpu.loader import UnavailableError, cpu_features

AVX512 = "avx512f avx512bw avx512dq avx512vl fma"


def cpu_info(folder: Path, flags: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: fpu sse {flags}\nbogomips\t: 1\n")
    return path


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def build(cache: Path) -> Path:
    return loader.build(cache, AVX512.split())


WRITE_OUTPUT = 'while [ "$1" != "-o" ]; do shift; done; echo compiled > "$2"; echo x >> {log}'


@pytest.mark.parametrize(
    ("more", "used"),
    [
        ("", ""),
        ("avx2 avx512_vnni amx_int8", ""),
        ("avx512_bf16", "avx512_bf16"),
        ("avx512_bf16 amx_tile", "avx512_bf16"),
        ("amx_tile amx_bf16", ""),
        ("amx_tile amx_int8 amx_bf16 avx512_bf16", "avx512_bf16 amx_tile amx_bf16"),
    ],
)
def test_what_a_cpu_has_is_used(tmp_path: Path, more: str, used: str) -> None:
    features = cpu_features("Linux", "x86_64", cpu_info(tmp_path, f"{more} {AVX512}"))
    assert set(features) == {*AVX512.split(), *used.split()}


@pytest.mark.parametrize("more", ["", "avx512f avx512bw avx512dq", "avx512_bf16 amx_tile amx_bf16"])
def test_without_the_whole_of_avx512_there_is_avx2(tmp_path: Path, more: str) -> None:
    assert cpu_features("Linux", "x86_64", cpu_info(tmp_path, f"avx fma {more} avx2")) == ["avx2", "fma"]


@pytest.mark.parametrize(
    ("system", "machine", "flags", "said"),
    [
        ("Linux", "x86_64", "avx sse4_2 fma", "the CPU has no avx2$"),
        ("Linux", "x86_64", "", "the CPU has no avx2, fma$"),
        ("Linux", "x86_64", "amx_bf16 amx_tile avx512_bf16 fma", "the CPU has no avx2$"),
        ("Darwin", "arm64", AVX512, "this is Darwin on arm64"),
        ("Linux", "aarch64", AVX512, "this is Linux on aarch64"),
    ],
)
def test_other_machines_are_refused_with_the_reason(
    tmp_path: Path, system: str, machine: str, flags: str, said: str
) -> None:
    with pytest.raises(UnavailableError, match=said):
        cpu_features(system, machine, cpu_info(tmp_path, flags))


def test_a_cpu_of_which_nothing_is_known(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="it is not known what the CPU has"):
        cpu_features("Linux", "x86_64", tmp_path / "cpuinfo")


def test_a_cpu_whose_name_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_bytes(b"model name\t: \xff\xfe\nflags\t\t: fma avx2\n")
    assert cpu_features("Linux", "x86_64", path) == ["avx2", "fma"]


def test_without_the_right_to_the_matrix_unit_vectors_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = [*AVX512.split(), "avx512_bf16", "amx_tile", "amx_bf16"]
    monkeypatch.setattr(loader, "cpu_features", lambda *_: everything)
    for is_granted, used in ((True, everything), (False, everything[:-2])):
        monkeypatch.setattr(loader, "_may_use_tiles", lambda answer=is_granted: answer)
        assert loader._features.__wrapped__() == tuple(used)


def test_options_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, f'echo "$@" >> {tmp_path / "said"}; ' + WRITE_OUTPUT.format(log=tmp_path / "log"))
    plain = build(tmp_path / "cache")
    assert loader.build(tmp_path / "cache", [*AVX512.split(), "avx512_bf16", "amx_tile", "amx_bf16"]) != plain
    first, *_, last, _ = (tmp_path / "said").read_text().splitlines()
    assert "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -c" in first
    assert "-mfma -mavx512bf16 -mamx-tile -mamx-bf16 -DREALRL_TILES -c" in last


def test_without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"there is no C\+\+ compiler"):
        build(tmp_path / "cache")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, 'echo "in file x" >&2; echo "x.cpp:1: error: no such flag" >&2; exit 1')
    with pytest.raises(UnavailableError, match=r"cannot compile realrl's: x\.cpp:1: error: no such flag"):
        build(tmp_path / "cache")


def test_a_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, "exit 0")
    (tmp_path / "cache").write_text("")
    with pytest.raises(UnavailableError, match=r"cannot be compiled: .*cache"):
        build(tmp_path / "cache")


def test_compiled_once_for_a_source_and_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"
    compiler(tmp_path, monkeypatch, WRITE_OUTPUT.format(log=log))
    first = build(cache)
    assert first.read_text() == "compiled\n"
    n_calls = len(log.read_text().splitlines())
    assert build(cache) == first
    assert len(log.read_text().splitlines()) == n_calls
    monkeypatch.setenv("CXX", f"{tmp_path / 'c++'} -O3")
    assert build(cache) != first
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".so", ".so"]  # nothing half done, and the lock


@pytest.mark.parametrize("content", [b"", b"comp"])
def test_a_damaged_one_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    compiler(tmp_path, monkeypatch, WRITE_OUTPUT.format(log=tmp_path / "log"))
    build(tmp_path / "cache").write_bytes(content)
    assert build(tmp_path / "cache").read_text() == "compiled\n"


def test_a_compiler_that_is_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(UnavailableError, match=r"CXX=.* is not a command"):
        build(tmp_path / "cache")


def test_a_compiler_that_speaks_another_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, "printf 'error: \\377' >&2; exit 1")
    with pytest.raises(UnavailableError, match="cannot compile realrl's: error"):
        build(tmp_path / "cache")


def test_whoever_wants_it_meanwhile_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"
    compiler(tmp_path, monkeypatch, f"sleep 0.3; {WRITE_OUTPUT.format(log=log)}")
    with ThreadPoolExecutor(3) as pool:
        assert len({*pool.map(build, [cache] * 3)}) == 1
    assert len(log.read_text().splitlines()) == 2  # to compile and to link


def test_they_can_be_turned_off() -> None:
    code = "from realrl.cpu.loader import why_not; print(why_not())"
    said = subprocess.run(
        [sys.executable, "-c", code], env={"REALRL_KERNELS": "0"}, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "REALRL_KERNELS=0 turns realrl's off"


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(loader, "cache_dir", fail)
    with pytest.raises(UnavailableError, match="no folder to compile realrl's in"):
        loader.cache_folder()
