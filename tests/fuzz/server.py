"""A process that has imported all that commands need, and runs each command that it is asked for in a fork of itself.

Requests and answers are lines of JSON. A fork has limits on its address space, its processor time and its time; it ends
without the end of the interpreter, which takes longer than the command.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet
import torch._dynamo
import transformers.models.auto

import realrl.data.datasets
import realrl.doctor.report
import realrl.model.files.hf
import realrl.runtime.processes.start as start
from realrl import cli
from tests.fuzz.command import MAX_CPU_S, MAX_GROWTH_BYTES, MAX_WAIT_S

IMPORTED = (pyarrow.parquet, torch._dynamo, transformers.models.auto, realrl.data.datasets, realrl.doctor.report)


def serve() -> None:
    """Answer requests until the input ends."""
    start.run_inline = start.run_supervised = lambda *_, **__: 0  # type: ignore[assignment]
    warnings.simplefilter("error")
    with os.fdopen(os.dup(0)) as requests, os.fdopen(os.dup(1), "w") as answers:
        for line in requests:
            request = json.loads(line)
            print(json.dumps(_answer(**request)), file=answers, flush=True)


def _answer(arguments: Sequence[str], folder: str, *, is_warm_up: bool = False) -> dict[str, Any]:
    with tempfile.TemporaryFile() as err:
        if is_warm_up:
            own_err = os.dup(2)
            code, cpu_s, growth_bytes = _run_here(arguments, folder, err), 0.0, 0
            os.dup2(own_err, 2)
            os.close(own_err)
            gc.freeze()  # a collection in a fork would copy every page
        else:
            code, cpu_s, growth_bytes = _run_in_a_fork(arguments, folder, err)
        err.seek(0)
        told = err.read().decode(errors="replace")
    return {"code": code, "cpu_s": cpu_s, "growth_bytes": growth_bytes, "err": told}


def _run_here(arguments: Sequence[str], folder: str, err: IO[bytes]) -> int:
    with open(os.devnull, "r+b") as null:
        os.dup2(null.fileno(), 0)
        os.dup2(null.fileno(), 1)
    os.dup2(err.fileno(), 2)
    os.chdir(folder)
    code = cli.main(arguments)
    for stream in (sys.__stdout__, sys.__stderr__):  # code of users may have put others in their place
        with contextlib.suppress(ValueError):  # it may also have closed them
            stream.flush()
    return code


def _run_in_a_fork(arguments: Sequence[str], folder: str, err: IO[bytes]) -> tuple[int, float, int]:
    """Return the exit code, the seconds of a processor and the memory that was added."""
    size = _address_space("VmSize")
    with mmap.mmap(-1, 8) as told:  # shared with the fork
        pid = os.fork()
        if pid == 0:
            try:
                resource.setrlimit(resource.RLIMIT_AS, (size + MAX_GROWTH_BYTES,) * 2)
                resource.setrlimit(resource.RLIMIT_CPU, (int(MAX_CPU_S) + 1,) * 2)
                code = _run_here(arguments, folder, err)
                told.write((_address_space("VmPeak") - size).to_bytes(8, "little"))
                os._exit(code)
            except BaseException:  # noqa: BLE001 - nothing may go on in the fork
                traceback.print_exc()
            finally:
                os._exit(70)
        descriptor = os.pidfd_open(pid)
        if not select.select([descriptor], [], [], MAX_WAIT_S)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(descriptor)
        _, status, used = os.wait4(pid, 0)
        growth_bytes = int.from_bytes(told.read(8), "little")
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, growth_bytes


def _address_space(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    serve()
