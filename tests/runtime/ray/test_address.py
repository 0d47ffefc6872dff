"""Address of a run's Ray cluster, and refusals of runs without one; the core imports no Ray."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from realrl.config.schema import ClusterConfig
from realrl.errors import UsageError
from realrl.runtime.ray import address
from realrl.runtime.ray.address import check_ray


@pytest.fixture(autouse=True)
def _has_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_is_installed", lambda: True)


def refused(cluster: ClusterConfig, environment: dict[str, str]) -> str:
    with pytest.raises(UsageError) as caught:
        check_ray(cluster, environment)
    return str(caught.value)


def test_the_address_is_that_of_the_key_or_the_environment_or_the_last_start_here(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        nowhere = {"RAY_ADDRESS": "127.0.0.1:1", "RAY_TMPDIR": str(tmp_path)}
        assert check_ray(ClusterConfig(ray_address=place), nowhere) == place
        assert check_ray(ClusterConfig(), {"RAY_ADDRESS": place}) == place
        assert check_ray(ClusterConfig(), {"RAY_TMPDIR": str(tmp_path)}) == "auto"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"{place}\n")
        assert check_ray(ClusterConfig(ray_address="auto"), nowhere) == place
    assert f"no Ray cluster answers at {place}: Connection refused" in refused(ClusterConfig(ray_address=place), {})
    assert "no Ray cluster answers" in refused(ClusterConfig(), {"RAY_TMPDIR": str(tmp_path)})


@pytest.mark.parametrize("given", ["ray://10.0.0.1:10001", "10.0.0.1", ":6379", "10.0.0.1:0", "local"])
def test_what_is_no_address_is_refused(given: str) -> None:
    assert f"RAY_ADDRESS={given} is no address of a Ray cluster" in refused(ClusterConfig(), {"RAY_ADDRESS": given})
    assert "cluster.ray_address=" in refused(ClusterConfig(ray_address=given), {})


def test_without_ray_the_user_hears_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_is_installed", lambda: False)
    assert "pip install 'realrl[ray]'" in refused(ClusterConfig(), {})


def test_the_core_imports_no_ray() -> None:
    modules = "realrl.cli.commands, realrl.runtime.processes.main, realrl.runtime.ray.start, realrl.doctor.preflight"
    code = f"import sys; sys.modules['ray'] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
