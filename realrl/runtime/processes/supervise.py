"""The process that the user started: it starts the master, passes signals on, and starts it again if processes die.

realrl run ──supervises──► master ──LocalLauncher──► worker 0, worker 1, ...
   │ stdin, a socket: start message and lifeline;       │ stdin pipe: lifeline
   │                  the master's signs of life back
   ├ Ctrl-C, SIGTERM, SIGHUP: the first is passed on, and ends the run after its step; a second one kills everything
   └ Ctrl-Z: everything stops, and goes on with this process
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from types import FrameType

import msgspec

from realrl.errors import Error, RunError
from realrl.runtime.checkpoints.store import load_manifest
from realrl.runtime.launchers.nodes import dismiss
from realrl.runtime.nodes.started import StartedAgents
from realrl.runtime.output import failure_report as report
from realrl.runtime.output.logs import log_path, log_size
from realrl.runtime.processes.lifeline import RUN_ID, find_leftovers, kill_leftovers, socket_folder
from realrl.runtime.processes.recovery import Recover, describe_again, describe_end, describe_restart, forget_failure
from realrl.runtime.processes.session import SessionStart, encode_start, run_session
from realrl.runtime.processes.signals import ORPHANED, SAME_KEYPRESS_S, interrupted_exit_code
from realrl.sched.master.recovery import GiveUp, Recovery
from realrl.sched.nodes.machines import SLACK_S
from realrl.sched.silence import Silences

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 0.2
_MASTER_SLACK_S = 5.0  # beyond its limit: it kills workers at the end
_LOSS_SLACK_S = 3.0  # in which a master reports by itself that a machine was refused
_MASTER_START_S = 60.0  # limit before its first sign of life: it imports, perhaps on a busy machine


def run_supervised(
    start: SessionStart,
    recover: Recover | None = None,
    *,
    inherited: Collection[int] = (),
    agents: StartedAgents | None = None,
) -> int:
    """Run the master in a process of its own and return the run's exit code; no process of the run is left behind.

    Must be called from the main thread: it handles signals until it returns.

    Args:
        recover: restart policy after lost processes; None never restarts.
        inherited: descriptors that the master holds open as well, as long as it lives.
        agents: those that this process has started; without enough of them the run ends.

    Raises:
        RunError: the master process cannot be started.
    """
    return _Supervisor(start, recover or Recover(), inherited, agents).run()


def run_inline(start: SessionStart) -> int:
    """Run master and workers in this process and thread; a second Ctrl-C or SIGTERM does not wait for the step."""
    previous = {signum: signal.getsignal(signum) for signum in (*_SIGNALS, ORPHANED)}
    try:
        return run_session(start, inline=True)
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class _Supervisor:
    def __init__(
        self, start: SessionStart, recover: Recover, inherited: Collection[int], agents: StartedAgents | None
    ) -> None:
        self._start = start
        self._agents = agents
        self._lost_at_s: float | None = None  # when too few agents were left
        self._inherited = inherited
        self._recover = recover
        self._recovery = Recovery(recover.retries)
        self._run_dir = Path(start.run_dir)
        self._master: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None  # of the master
        self._silent_s = 0.0  # of a master that was killed for it
        self._log_begin = 0  # byte of the master's log where this attempt begins
        self._received: int | None = None  # the first signal
        self._received_at_s = 0.0
        self._signals = (*_SIGNALS, *([signal.SIGUSR1] if start.nodes is not None else []))

    def run(self) -> int:
        previous = {signum: signal.getsignal(signum) for signum in (*self._signals, signal.SIGTSTP)}
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        try:
            for signum, handler in previous.items():
                if handler is not signal.SIG_IGN:  # nohup, background jobs
                    signal.signal(signum, self._on_stop if signum == signal.SIGTSTP else self._on_signal)
            while True:
                exit_code = self._attempt(blocked)
                restarted = self._next_attempt(exit_code)
                if isinstance(restarted, int):
                    if self._start.nodes is not None:
                        dismiss(self._start.nodes, restarted)
                    return restarted
                self._start = restarted
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            if self._master is not None:
                self._end(self._master)

    def _attempt(self, blocked: Iterable[int]) -> int:
        """Run a master to its end and return its exit code."""
        forget_failure(self._run_dir)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        if self._received is not None:  # between two attempts
            return self._signal_code(self._received)
        # The master inherits the blocked signals: what arrives before it can handle it waits until it can.
        master = self._master = self._spawn()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._hand_over()
        self._silent_s = self._watch(master)
        exit_code = master.wait()
        self._remove_leftovers()
        self._end(master)
        return exit_code

    def _watch(self, master: subprocess.Popen[bytes]) -> float:
        """Wait for the end of the master and return 0, or kill one that is silent and return the seconds.

        A master whose output nobody takes (Ctrl-S, a pager) may be waiting for that: it is not judged.
        """
        assert self._lifeline is not None
        limit_s = self._recover.master_timeout_s + _MASTER_SLACK_S
        silences, has_started = Silences(max(limit_s, _MASTER_START_S), (master.pid,), now_s=time.monotonic()), False
        self._lifeline.settimeout(_LOOK_S)
        while True:
            try:
                if not self._lifeline.recv(4096):
                    return 0.0
                if not has_started:
                    has_started, silences = True, Silences(limit_s, (master.pid,), now_s=time.monotonic())
                silences.hear(master.pid)
            except TimeoutError:
                if not _is_output_taken():
                    silences.hear(master.pid)
            except ConnectionResetError:  # it left a part of its start message unread
                return 0.0
            if self._is_forsaken(time.monotonic()):
                master.kill()
                return 0.0
            for _, silent_s in silences.look(time.monotonic()):
                master.kill()
                return silent_s

    def _is_forsaken(self, now_s: float) -> bool:
        """True if too few agents are left, and the master had time to notice, to report it and to end the workers."""
        loss = None if self._agents is None else self._agents.loss()
        if loss is None:
            return False
        self._lost_at_s = now_s if self._lost_at_s is None else self._lost_at_s
        nodes = self._start.nodes
        patience_s = 0.0 if loss.is_total or nodes is None else nodes.lease_s + SLACK_S
        return now_s - self._lost_at_s > patience_s + _LOSS_SLACK_S

    def _next_attempt(self, exit_code: int) -> SessionStart | int:
        """The start message of the next attempt, or the exit code if the run is over; reports a master's death."""
        died = min(exit_code, 0)
        if died:
            exit_code = 1 if self._received is None else self._signal_code(self._received)
        is_interrupted = self._received is not None
        ended = describe_end(self._run_dir, died or exit_code, is_interrupted=is_interrupted, silent_s=self._silent_s)
        decision = self._recovery.handle(ended)
        loss = None if self._agents is None or is_interrupted else self._agents.loss()
        if loss is not None and (died or not isinstance(decision, GiveUp)):
            print(f"realrl: error: {loss.message}\n  {loss.remedy}", file=sys.stderr, flush=True)
            return loss.exit_code
        if isinstance(decision, GiveUp):
            self._explain(died)
            if decision.why:
                print(f"realrl: {decision.why}", file=sys.stderr, flush=True)
            return exit_code
        try:
            resume = self._recover.find_checkpoint()
            if resume.folder is not None and load_manifest(resume.folder).is_last:
                self._explain(died, again="its last step was complete")
                print(f"the last step was complete: {resume.folder}", flush=True)
                return 0
            again = describe_again(decision, self._recover.retries, resume)
        except Error as error:
            self._explain(died)
            print(f"realrl: error: the run cannot be started again: {error}", file=sys.stderr, flush=True)
            return exit_code
        self._explain(died, again=again)
        told = describe_restart(decision, self._recover.retries, resume, ended.step)
        folder = "" if resume.folder is None else str(resume.folder)
        nodes = self._start.nodes
        if nodes is not None:
            nodes = msgspec.structs.replace(nodes, attempt=nodes.attempt + 1)
        return msgspec.structs.replace(self._start, resume_from=folder, notes=(*resume.notes, told), nodes=nodes)

    def _signal_code(self, signum: int) -> int:
        return interrupted_exit_code(signum, is_on_machines=self._start.nodes is not None)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._log_begin = log_size(log_path(self._run_dir, None))
        command = [sys.executable, "-P", "-m", "realrl.runtime.processes.main", "master"]
        environment = {**os.environ, RUN_ID: self._start.run_id}
        self._lifeline, stdin = socket.socketpair()
        try:
            with stdin:
                nodes = self._start.nodes
                inherited = (*self._inherited, *(() if nodes is None else (nodes.listening,)))
                return subprocess.Popen(command, stdin=stdin.fileno(), env=environment, pass_fds=inherited)
        except OSError as error:
            self._lifeline.close()
            raise RunError(
                f"cannot start the master process: {error}",
                remedy="The limit on processes (`ulimit -u`) or open files (`ulimit -n`) may be too low.",
            ) from error

    def _hand_over(self) -> None:
        """Send the start message; the socket stays open as the master's lifeline."""
        assert self._lifeline is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # wait() tells how the master died
            left = 0 if self._received is not None else self._recovery.restarts_left
            self._lifeline.sendall(encode_start(msgspec.structs.replace(self._start, restarts_left=left)))

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._received is None:
            self._received, self._received_at_s = signum, now_s
            self._pass_on(signum)
        elif now_s - self._received_at_s > SAME_KEYPRESS_S:
            self._pass_on(signal.SIGKILL)

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        """Stop the whole run with this process (workers have process groups of their own), and go on with it."""
        pids = find_leftovers(RUN_ID, self._start.run_id)
        for stop_or_go in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, stop_or_go)
            if stop_or_go == signal.SIGSTOP:
                os.kill(os.getpid(), signal.SIGSTOP)

    def _pass_on(self, signum: int) -> None:
        if self._master is not None:
            self._master.send_signal(signal.SIGTERM if signum == signal.SIGUSR1 else signum)

    def _explain(self, died: int, *, again: str = "") -> None:
        """Report the end of a master that could not report it itself.

        Args:
            died: its exit code; 0 if it has reported what there was.
            again: what happens next by itself.
        """
        if not died:
            return
        assert self._master is not None
        _restore_cursor()
        if self._received is not None:
            name = signal.Signals(self._received).name
            print(f"realrl: stopped at once after {name}", file=sys.stderr)
            return
        if self._lost_at_s is not None:  # which is told next
            return
        told = report.master_died(
            self._master.pid,
            died,
            silent_s=self._silent_s,
            log=log_path(self._run_dir, None),
            log_begin=self._log_begin,
            again=again,
        )
        print(report.render(told), file=sys.stderr, flush=True)

    def _end(self, master: subprocess.Popen[bytes]) -> None:
        if master.poll() is None:  # only when an exception interrupted the wait
            master.kill()
            master.wait()
            self._remove_leftovers()
        if self._lifeline is not None:
            self._lifeline.close()

    def _remove_leftovers(self) -> None:
        """End the processes and remove the sockets that a killed master left."""
        kill_leftovers(RUN_ID, self._start.run_id)
        shutil.rmtree(socket_folder(self._start.run_id), ignore_errors=True)


def _is_output_taken() -> bool:
    """True if stdout and stderr, which the master shares, have room for more."""
    descriptors = [stream.fileno() for stream in (sys.__stdout__, sys.__stderr__) if stream is not None]
    return len(select.select([], descriptors, [], 0.0)[1]) == len(descriptors)


def _restore_cursor() -> None:
    """Show the cursor again, which a killed master may have left hidden."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)
