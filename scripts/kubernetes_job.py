"""Write the manifest of a run on several machines of Kubernetes: an indexed job, and a service that names its pods.

    python scripts/kubernetes_job.py --image registry/realrl:1 --machines 2 --gpus 8 --claim data --out ppo.yaml \\
        -- run ppo models.actor.path=/data/llama dataset.path=/data/prompts.jsonl run_dir=/data/runs/a
    realrl node --new-key | kubectl create secret generic ppo-key --from-file=key=/dev/stdin
    kubectl apply -f ppo.yaml

Each pod runs the same command. That of index 0 leads the run, the others join it. A pod that Kubernetes wants back gets
TERM: the run saves its step and ends with 75, upon which all pods are made anew and go on. Codes 1 and 2, a run that
failed and wrong input, end the job.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

PORT = 29500
NAME = "realrl"
_KEY = "key"


@dataclass(frozen=True)
class Wanted:
    """Resources that a run wants of Kubernetes.

    Attributes:
        gpus: of each machine; 0 computes on the CPU with `workers` processes.
        claim: name of a volume claim that all machines mount at `mount`.
        claim_size: makes the claim, of this size; "" if it is there.
        grace_s: time between TERM and KILL: for a step and its checkpoint.
        words: arguments of realrl.
    """

    name: str
    image: str
    machines: int
    gpus: int
    workers: int
    cpus: str
    memory: str
    claim: str
    claim_size: str
    mount: str
    grace_s: int
    words: tuple[str, ...]


def manifest(wanted: Wanted) -> list[dict[str, Any]]:
    """Return the documents of the manifest.

    Raises:
        ValueError: the run folder is not on the shared volume.
    """
    run_dir = next((word.partition("=")[2] for word in wanted.words if word.startswith("run_dir=")), "")
    if not run_dir or not PurePosixPath(run_dir).is_relative_to(wanted.mount):
        raise ValueError(f"run_dir={run_dir} is not below {wanted.mount}, which all machines share")
    claims = [_claim(wanted)] if wanted.claim_size else []
    return [*claims, _service(wanted), _job(wanted)]


def _claim(wanted: Wanted) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": wanted.claim},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": wanted.claim_size}}},
    }


def _service(wanted: Wanted) -> dict[str, Any]:
    """Names for the pods: NAME-0.NAME is that of the first."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": wanted.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": wanted.name},
            "ports": [{"name": "join", "port": PORT}],
        },
    }


def _job(wanted: Wanted) -> dict[str, Any]:
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"action": "Ignore", "onExitCodes": {"containerName": NAME, "operator": "In", "values": [75]}},
        {"action": "FailJob", "onExitCodes": {"containerName": NAME, "operator": "In", "values": [1, 2]}},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": wanted.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": wanted.machines,
            "parallelism": wanted.machines,
            "backoffLimit": 20,
            "podFailurePolicy": {"rules": rules},
            "template": {"spec": _pod(wanted)},
        },
    }


def _pod(wanted: Wanted) -> dict[str, Any]:
    limits: dict[str, Any] = {"nvidia.com/gpu": wanted.gpus} if wanted.gpus else {}
    container = {
        "name": NAME,
        "image": wanted.image,
        "command": ["realrl"],
        "args": list(_words(wanted)),
        "env": [
            {"name": "MASTER_ADDR", "value": f"{wanted.name}-0.{wanted.name}"},
            {"name": "MASTER_PORT", "value": str(PORT)},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "REALRL_KEY", "valueFrom": {"secretKeyRef": {"name": f"{wanted.name}-key", "key": _KEY}}},
        ],
        "resources": {"requests": {"cpu": wanted.cpus, "memory": wanted.memory}, "limits": limits},
        "volumeMounts": [
            {"name": "shared", "mountPath": wanted.mount},
            {"name": "memory", "mountPath": "/dev/shm"},  # NCCL and reward processes take more than the usual 64 MB
        ],
    }
    return {
        "restartPolicy": "Never",  # the policy for exit codes makes new pods
        "subdomain": wanted.name,
        "terminationGracePeriodSeconds": wanted.grace_s,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": wanted.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _words(wanted: Wanted) -> tuple[str, ...]:
    n_each = wanted.gpus or wanted.workers
    added = [
        "launcher=external",
        f"cluster.n_nodes={wanted.machines}",
        f"cluster.n_devices_per_node={n_each}",
        f"cluster.device={'cuda' if wanted.gpus else 'cpu'}",
        "resume=auto",
    ]
    given = {word.partition("=")[0] for word in wanted.words}
    return (*wanted.words, *(word for word in added if word.partition("=")[0] not in given))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="WORD", help="arguments of realrl, after --: run ppo ...")
    parser.add_argument("--name", default="", help="of job and service; default: the experiment's")
    parser.add_argument("--image", required=True, help="with realrl and its packages")
    parser.add_argument("--machines", type=int, required=True, help="pods")
    parser.add_argument("--gpus", type=int, default=0, help="of each pod; 0: workers on the CPU")
    parser.add_argument("--workers", type=int, default=1, help="of each pod, without GPUs")
    parser.add_argument("--cpus", default="4", help="of each pod")
    parser.add_argument("--memory", default="16Gi", help="of each pod")
    parser.add_argument("--claim", required=True, help="volume claim that all pods mount (ReadWriteMany)")
    parser.add_argument("--claim-size", default="", help="make the claim, of this size: 500Gi")
    parser.add_argument("--mount", default="/data", help="where they mount it")
    parser.add_argument("--grace", type=int, default=120, metavar="S", help="seconds for a step and its checkpoint")
    parser.add_argument("--out", default="", metavar="FILE", help="default: print it")
    options = parser.parse_args(argv)
    name = options.name or Path(options.words[min(1, len(options.words) - 1)]).stem.replace("_", "-")
    wanted = Wanted(
        name=name,
        image=options.image,
        machines=options.machines,
        gpus=options.gpus,
        workers=options.workers,
        cpus=options.cpus,
        memory=options.memory,
        claim=options.claim,
        claim_size=options.claim_size,
        mount=options.mount,
        grace_s=options.grace,
        words=tuple(options.words),
    )
    try:
        documents = manifest(wanted)
    except ValueError as error:
        parser.error(str(error))
    text = yaml.safe_dump_all(documents, sort_keys=False)
    hint = f"realrl node --new-key | kubectl create secret generic {name}-key --from-file={_KEY}=/dev/stdin"
    text = f"# The key of the run is a secret of its own:\n#   {hint}\n{text}"
    if options.out:
        Path(options.out).write_text(text)
        print(f"wrote {options.out}; make the key first: {hint}")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
