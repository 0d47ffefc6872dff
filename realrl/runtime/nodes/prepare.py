"""Start of a run on several machines, on the master's side: where it listens, its key, and how the others join."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from realrl.data.assets.store import cache_dir
from realrl.errors import UsageError
from realrl.experiment.run_plan import RunPlan
from realrl.runtime.launchers.nodes import NodesStart
from realrl.runtime.nodes.addresses import listen, master_address
from realrl.runtime.nodes.key import new_key, write_join_file
from realrl.runtime.nodes.survey import code_digests, files_of_run, versions
from realrl.runtime.processes.machine import common_environment


@contextlib.contextmanager
def open_nodes(plan: RunPlan, run_dir: Path, given: bytes | None) -> Iterator[NodesStart]:
    """Listen for agents. Where they start by hand, tell the user how they join, by a file that goes with the block.

    Args:
        given: the key that the user has set; None makes one.

    Raises:
        UsageError: there is no address or port to listen on, the key is none, or the file cannot be written.
    """
    cluster = plan.config.cluster
    key = given or new_key()
    host = master_address(cluster)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(host, cluster.master_port))
        port = listener.getsockname()[1]
        place = f"{host}:{port}"
        config = plan.config
        if config.launcher == "external":
            how = f"realrl node {place}  (with the same REALRL_KEY)"
            if given is None or cluster.join_file:
                path = _join_file(plan, run_dir)
                write_join_file(path, place, key)
                stack.callback(path.unlink, missing_ok=True)
                how = f"realrl node --join {path}"
            print(f"on each of {cluster.n_nodes} machines: {how}", flush=True)
        yield NodesStart(
            key=key,
            host=host,
            port=port,
            listening=listener.fileno(),
            n_machines=cluster.n_nodes,
            n_workers_each=cluster.n_devices_per_node,
            n_accelerators=cluster.n_needed_per_node if cluster.device == "cuda" else 0,
            lease_s=cluster.lease_s,
            start_timeout_s=cluster.start_timeout_s,
            versions=versions(),
            digests=code_digests(),
            files=files_of_run(config),
            directory=os.getcwd(),
            device=cluster.device,
            environment=common_environment(plan),
        )


def _join_file(plan: RunPlan, run_dir: Path) -> Path:
    given = plan.config.cluster.join_file
    name = f"{plan.experiment.name}-{time.strftime('%Y-%m-%d_%H-%M-%S')}-{os.getpid()}.json"
    path = Path(given).absolute() if given else cache_dir().absolute() / "join" / name
    if path.resolve().is_relative_to(run_dir.resolve()):
        raise UsageError(
            f"cluster.join_file={given} is in the run folder, which others may read one day",
            remedy="Choose a file elsewhere, in your home for example.",
        )
    return path
