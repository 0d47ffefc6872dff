"""A worker's share of checkpoints: copied to host memory between two requests, then written by a background thread.

SaveCheckpoint ─► wait for the writer ─► copy: roles, rows ─► the next request
                                            │                      ▲ if the request waits
                                            └─► writer: files, digests, fsync ─► CheckpointSaved
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
import torch

from realrl.data.rows import SampleStore
from realrl.engine import device as devices
from realrl.experiment.run_plan import RunPlan
from realrl.runtime.checkpoints.compatibility import saved_roles
from realrl.runtime.checkpoints.roles import HostCopies, RoleCopy, copy_roles
from realrl.runtime.checkpoints.samples import rows_state
from realrl.runtime.checkpoints.store import checkpoint_store, sample_file, seal
from realrl.runtime.worker.roles import HostedRole
from realrl.sched.messages import CheckpointSaved, Reply, SaveCheckpoint, Span

_log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes one checkpoint at a time: a second one waits for the first, so that host memory holds one copy.

    Args:
        roles: the roles that this rank hosts.
        store: this rank's rows.
        device: where the parameters are.
    """

    def __init__(
        self, plan: RunPlan, rank: int, roles: Mapping[str, HostedRole], store: SampleStore, device: torch.device
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._roles = roles
        self._store = store
        self._device = device
        self._copies = HostCopies()
        self._saved_roles = saved_roles(plan, rank)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=devices.use_one_thread)
        self._writing: Future[Reply] | None = None

    def save(self, request: SaveCheckpoint) -> Future[Reply]:
        """Copy this rank's share to host memory; the returned reply is ready when all files are written."""
        start_s = time.time()
        if self._writing is not None:
            wait([self._writing])
        copied_s = time.time()
        self._copies.begin(nothing_changes=request.is_last or request.waits)
        roles = copy_roles(self._plan, self._roles, self._rank, self._copies)
        rows = RoleCopy("", states={sample_file(self._rank): rows_state(self._store, request.rows)})
        self._copies.end()
        devices.synchronize(self._device)
        end_s = time.time()
        args: dict[str, str | int | float] = {
            "step": request.step, "bytes": self._copies.copied_bytes, "waited_s": copied_s - start_s,
        }  # fmt: skip
        span = Span("checkpoint", "save", start_s, end_s, args)
        self._writing = self._thread.submit(self._write, request, [*roles, rows] if request.rows else roles, span)
        if request.waits:
            wait([self._writing])
            self._copies.forget()
        return self._writing

    def close(self) -> None:
        """Wait until everything is written and answered."""
        self._thread.shutdown(wait=True)

    def _write(self, request: SaveCheckpoint, copies: list[RoleCopy], span: Span) -> Reply:
        folder = Path(request.directory)
        try:
            paths = [path for copy in copies for path in copy.write(folder)]
            files = {str(path.relative_to(folder)): seal(path) for path in paths}
            _log.info("step %d: %d files of the checkpoint are written", request.step, len(files))
        except OSError as err:
            raise checkpoint_store(self._plan, folder.parent).save_failed(err, request.step) from None
        if request.waits:
            span = msgspec.structs.replace(span, end_s=time.time())
        return CheckpointSaved(self._rank, request.seq, request.step, (span,), files, self._saved_roles)
