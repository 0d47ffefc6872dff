"""Manifests for Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_job import main

from realrl.sched.nodes.jobs import job_of

BASE = ("--image", "registry/realrl:1", "--machines", "2", "--claim", "data")
RUN = ("--", "run", "ppo_ref_ema", "preset=tiny", "run_dir=/data/runs/a")


def documents(folder: Path, *options: str) -> dict[str, Any]:
    """Kind of a document -> the document."""
    assert main([*BASE, "--out", str(folder / "job.yaml"), *options, *RUN]) == 0
    return {document["kind"]: document for document in yaml.safe_load_all((folder / "job.yaml").read_text())}


def test_every_pod_runs_the_same_command_and_finds_the_first(tmp_path: Path) -> None:
    made = documents(tmp_path, "--gpus", "8")
    job, service = made["Job"], made["Service"]
    assert (job["metadata"]["name"], service["metadata"]["name"]) == ("ppo-ref-ema", "ppo-ref-ema")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": "ppo-ref-ema"}
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert (pod["subdomain"], pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == (
        "ppo-ref-ema",
        "Never",
        120,
    )
    [container] = pod["containers"]
    assert container["args"][:2] == ["run", "ppo_ref_ema"]
    assert {"launcher=external", "cluster.n_nodes=2", "cluster.n_devices_per_node=8", "resume=auto"} < set(
        container["args"]
    )
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    environment = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    found = job_of({**environment, "JOB_COMPLETION_INDEX": "1"})
    assert found is not None
    assert (found.index, found.master_host, found.master_port) == (1, "ppo-ref-ema-0.ppo-ref-ema", 29500)
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if volume["name"] == "shared"]
    assert claims == ["data"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_exit_codes_decide_on_new_pods(tmp_path: Path) -> None:
    rules = documents(tmp_path)["Job"]["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())}
    assert by_code == {75: "Ignore", 1: "FailJob", 2: "FailJob"}
    assert rules[0] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}


def test_the_key_is_in_a_secret_and_not_in_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [container] = documents(tmp_path)["Job"]["spec"]["template"]["spec"]["containers"]
    key = next(entry for entry in container["env"] if entry["name"] == "REALRL_KEY")
    assert key == {"name": "REALRL_KEY", "valueFrom": {"secretKeyRef": {"name": "ppo-ref-ema-key", "key": "key"}}}
    assert "kubectl create secret generic ppo-ref-ema-key --from-file=key=/dev/stdin" in capsys.readouterr().out


def test_a_claim_is_made_where_its_size_is_given(tmp_path: Path) -> None:
    assert "PersistentVolumeClaim" not in documents(tmp_path)
    claim = documents(tmp_path, "--claim-size", "500Gi")["PersistentVolumeClaim"]
    assert claim["spec"] == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "500Gi"}}}


def test_settings_of_the_user_stay(tmp_path: Path) -> None:
    assert main([*BASE, "--out", str(tmp_path / "a.yaml"), *RUN, "resume=never", "cluster.n_nodes=1"]) == 0
    job = list(yaml.safe_load_all((tmp_path / "a.yaml").read_text()))[-1]
    words = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [word for word in words if word.startswith(("resume", "cluster.n_nodes"))] == [
        "resume=never",
        "cluster.n_nodes=1",
    ]


@pytest.mark.parametrize("run_dir", ["run_dir=/tmp/a", "steps=3"])
def test_a_run_folder_that_is_not_shared_is_refused(run_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*BASE, "--", "run", "ppo", run_dir])
    assert refused.value.code == 2
    assert "is not below /data, which all machines share" in capsys.readouterr().err
