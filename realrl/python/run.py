"""`run`: what ``realrl run`` does, for scripts and notebooks.

                      the calling process                     a process of its own
    launcher=inline   checks, master, workers
    any other         `Watcher` ─ settings, lifeline ───────► checks, supervisor ──► master ──► workers
                              ◄─ output, run folder, error ─┘

A process of its own reads files of the user's as they are now, needs no main thread, and does not fork the caller's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec

import realrl.errors
from realrl.errors import ConfigError, Error, RunError, UsageError
from realrl.experiment.declaration import Experiment
from realrl.experiment.discovery import forget_files, give_experiment, reference_of
from realrl.experiment.loading import failed_in
from realrl.files import read_input
from realrl.python.child import CALLED, Ended
from realrl.python.given import give_function
from realrl.python.result import RunResult
from realrl.python.watcher import Watcher
from realrl.runtime.output.logs import log_path
from realrl.runtime.processes.lifeline import RUN_ID
from realrl.runtime.processes.recovery import FAILURE_FILE
from realrl.sched.events import Failure

Settings = Mapping[str, object] | Sequence[str]
_INTERRUPTED = 130


def run(
    experiment: str | PathLike[str] | Experiment,
    overrides: Settings | None = None,
    *,
    check: bool = True,
    quiet: bool = False,
) -> RunResult:
    """Train as ``realrl run`` does, and wait for the end.

    Args:
        experiment: a registered name, a file, a module, or an `Experiment`.
        overrides: configuration values: a mapping, nested or with dotted keys, or a list of ``"key=value"``. A function
            may stand where the configuration names one.
        check: raise an error for a run that failed, and KeyboardInterrupt for one that was interrupted; False returns
            them too, with their exit code.
        quiet: show no progress.

    Raises:
        UsageError: the run is refused, and nothing was started. Other errors of `realrl.errors`, too.
        RunError: the run failed; its folder has what it wrote.
        KeyboardInterrupt: Ctrl-C has ended the run, after its step was finished and saved.

    Examples:
        >>> result = realrl.run("ppo", {"preset": "tiny", "steps": 5, "models": {"actor": {"optimizer": {"lr": 1e-3}}}})
        >>> result.metrics[-1]["reward/mean"]
    """
    if os.environ.get(CALLED) or os.environ.get(RUN_ID) or _Here.is_running:
        raise UsageError(
            "realrl.run was called by code that a run imports",
            remedy='Put the call below: if __name__ == "__main__":',
        )
    settings = {} if overrides is None else overrides
    if isinstance(settings, str) or not isinstance(settings, Mapping | Sequence):
        raise UsageError("overrides are neither a mapping nor a list", remedy="Write {'steps': 5}, or ['steps=5'].")
    is_here = _is_inline(settings)
    reference = _reference(experiment, is_here=is_here)
    settings = _plain(settings, "", is_here=is_here)
    begin_s = time.time()
    if is_here:
        ended = _Here.run(reference, settings, quiet=quiet)
    else:
        ended = Watcher(quiet=quiet).run(reference, settings)
    if ended.error is not None:
        kind = getattr(realrl.errors, ended.error.kind, Error)
        raise kind(ended.error.message, remedy=ended.error.remedy or None)
    if not ended.run_dir:
        raise (
            KeyboardInterrupt
            if ended.exit_code == _INTERRUPTED
            else RunError(f"the run ended before it began, with exit code {ended.exit_code}")
        )
    result = RunResult(Path(ended.run_dir), ended.exit_code)
    if check and ended.exit_code:
        raise _error_of(result, begin_s)
    return result


def _is_inline(settings: Settings) -> bool:
    """Return True if settings say ``launcher=inline``; the last word counts."""
    if isinstance(settings, Mapping):
        return settings.get("launcher") == "inline"
    launchers = [word.partition("=")[2] for word in settings if str(word).lstrip("+").startswith("launcher=")]
    return launchers[-1:] == ["inline"]


def _reference(experiment: str | PathLike[str] | Experiment, *, is_here: bool) -> str:
    """Return the name by which the processes of the run find an experiment.

    Raises:
        ConfigError: it is an object that they cannot import.
    """
    if isinstance(experiment, str | PathLike):
        return os.fspath(experiment)
    if not isinstance(experiment, Experiment):
        raise UsageError(
            f"a {type(experiment).__name__} is no experiment", remedy="Give a name, a file, or a realrl.Experiment."
        )
    found = reference_of(experiment)
    if found is not None and not (is_here and found.endswith(".py")):
        return found
    if is_here:
        return give_experiment(experiment)
    raise _not_importable(f"experiment '{experiment.name}'", "end it with EXPERIMENT = Experiment(...), and name that")


def _plain(value: Any, key: str, *, is_here: bool) -> Any:
    """Return a value as JSON has it, with names in the place of functions.

    Raises:
        UsageError: the configuration has no such values, or the processes of the run cannot import a function.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {name: _plain(inner, f"{key}.{name}".lstrip("."), is_here=is_here) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, key, is_here=is_here) for inner in value]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, PathLike):
        return os.fspath(value)
    if isinstance(value, FunctionType):
        return _function_name(value, key, is_here=is_here)
    raise UsageError(
        f"{key} cannot be of type {type(value).__name__}",
        remedy="Values are texts, numbers, True, False, None, functions, and lists and mappings of these.",
    )


def _function_name(function: FunctionType, key: str, *, is_here: bool) -> str:
    name, file = function.__name__, function.__code__.co_filename
    if is_here:
        return give_function(name, function)
    is_at_top = function.__qualname__ == name and name.isidentifier()
    if is_at_top and "." in function.__module__ and function.__module__ in sys.modules:
        return f"{function.__module__}:{name}"
    if is_at_top and file.endswith(".py") and os.path.isfile(file):
        return f"{os.path.abspath(file)}:{name}"
    wanted = name if name.isidentifier() else "NAME"
    raise _not_importable(f"{key}: function {name}", f"write {key}='my_file.py:{wanted}'")


def _not_importable(what: str, how: str) -> ConfigError:
    return ConfigError(
        f"{what} is an object of this session, which the processes of a run cannot import",
        remedy=f"Save it in a file ({how}), or run it in this process: launcher=inline.",
    )


def _error_of(result: RunResult, begin_s: float) -> BaseException:
    """Return the error that tells of a run that did not come to its end."""
    if (result.exit_code or 0) >= 128:
        return KeyboardInterrupt(f"the run in {result.run_dir} was interrupted: realrl.load({str(result.run_dir)!r})")
    kind = UsageError if result.exit_code == UsageError.exit_code else RunError
    path = result.run_dir / FAILURE_FILE
    try:
        failure = msgspec.json.decode(read_input(path), type=Failure)
        if path.stat().st_mtime >= begin_s - 1.0:  # of this run, not of one before it in the same folder
            return kind(failure.message, remedy=failure.remedy or None)
    except (OSError, msgspec.MsgspecError):
        pass
    return kind(f"the run in {result.run_dir} failed", remedy=f"See its log: {log_path(result.run_dir, None)}")


class _Here:
    """Runs inside this process, one at a time."""

    is_running = False

    @classmethod
    def run(cls, reference: str, settings: Settings, *, quiet: bool) -> Ended:
        """Run to the end, on the main thread.

        Raises:
            UsageError: the run is refused.
        """
        from realrl.cli.commands import run_settings

        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "launcher=inline handles signals, and this thread is not the main one",
                remedy="Leave launcher=inline out, or call realrl.run from the main thread.",
            )
        forget_files(reference)
        folders: list[str] = []
        cls.is_running = True
        try:
            with _shown(not quiet):
                code = run_settings(reference, settings, lambda folder: folders.append(str(folder)))
        except Error:
            raise
        except (Exception, SystemExit) as error:
            own = failed_in(error)
            if own is None:
                raise
            raise own from error
        finally:
            cls.is_running = False
        return Ended(code, folders[-1] if folders else "")


@contextlib.contextmanager
def _shown(is_shown: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not is_shown:
            nothing = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nothing))
            stack.enter_context(contextlib.redirect_stderr(nothing))
        yield
