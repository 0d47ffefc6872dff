"""The command line ``realrl``. Arguments are read before heavy imports; only runs and checks import torch."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from os import _exit  # which stays itself while code of users runs
from types import FrameType
from typing import NoReturn

from realrl.config.secrets import masked_argument
from realrl.errors import MAX_TEXT_CHARS, Error, UsageError, did_you_mean, is_text, one_screen
from realrl.version import VERSION

INTERRUPTED = 130
COMMANDS = {
    "run": "realrl.cli.commands:run",
    "eval": "realrl.cli.commands:evaluate",
    "gen": "realrl.cli.commands:gen",
    "doctor": "realrl.cli.commands:doctor",
    "check": "realrl.cli.check:check",
    "simulate": "realrl.cli.commands:simulate",
    "plan": "realrl.cli.commands:find_plan",
    "fuse": "realrl.cli.commands:fuse",
    "profile": "realrl.cli.commands:profile",
    "report": "realrl.cli.report:report",
    "watch": "realrl.cli.report:watch",
    "node": "realrl.cli.clusters.node:node",
    "list": "realrl.cli.commands:list_experiments",
    "graph": "realrl.cli.commands:graph",
    "config": "realrl.cli.commands:config",
}
HELP = """\
usage: realrl COMMAND ...

Train language models with reinforcement learning: an algorithm is a list of model function calls.

commands:
  run NAME [key=value ...]      train; --dry-run shows the plan and starts nothing
  eval NAME [key=value ...]     evaluate a model on held-out data
  gen [key=value ...]           responses to the prompts of a file; --out FILE
  doctor NAME [key=value ...]   what a run would need of every device, and what is wrong with it
  check NAME [key=value ...]    whether its numbers depend on how it is run: workers, micro-batches, order; and why
  simulate NAME [key=value ...] the time of a step and what bounds it; starts nothing
  plan NAME [--hardware NAME]   where each call should run on given machines, and how; --out FILE
  fuse NAME|FILE.yaml           a schedule in which models train on the same devices at once; --page FILE
  profile NAME [--out FILE]     measure this machine for an experiment's models: a hardware file for predictions
  report RUN [RUN ...]          a page about runs: curves, samples, times, settings
  watch RUN [RUN ...]           the same page while runs go on, on this machine only
  node HOST:PORT | --join FILE  let this machine take part in a run on several machines
  list                          the registered experiments
  graph NAME [--out FILE]       the calls and what flows between them, as text or as a picture
  config NAME [key=value ...]   every key, its value and what it accepts
  version                       realrl's version

NAME is an experiment, which is an algorithm with its defaults: one of 'realrl list', a file of your own
(./my_algorithm.py) or a module (my_package.my_algorithm).

examples:
  realrl run ppo preset=tiny                       PPO on a toy task: no download, a minute on a laptop
  realrl run ppo preset=tiny --dry-run             what would run where
  realrl run ppo preset=tiny cluster.n_devices_per_node=2 allocation=split   two workers, roles on both
  realrl run ./my_algorithm.py models.actor.path=/models/llama generation.temperature=0.7
  realrl graph ppo --out ppo.svg

'realrl COMMAND --help' says more about a command, 'realrl run NAME --help' lists the keys of an experiment.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, 1 if the run failed, 2 if the input is wrong, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_closed_streams()
    try:
        with leaving_on_ctrl_c():
            return _dispatch(arguments)
    except KeyboardInterrupt:
        print("realrl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Error as error:
        print(one_screen(f"realrl: error: {error}"), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output has left (realrl list | head); stdout must not be flushed into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:  # noqa: BLE001 - the last resort
        return _unexpected(error)


def _unexpected(error: BaseException) -> int:
    """Report an error of the user's own code, which ran before anything started, or a bug; return the exit code."""
    import traceback

    from realrl.experiment.loading import failed_in

    own = failed_in(error)
    if own is not None:
        print(one_screen(f"realrl: error: {own}"), file=sys.stderr)
        return UsageError.exit_code
    if isinstance(error, SystemExit):  # argparse, after --help
        return int(error.code or 0)
    traceback.print_exception(error)
    print(
        "realrl: this was not expected: it is a bug in realrl, please report it with the lines above.", file=sys.stderr
    )
    return 1


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse arguments that are no text, or too long.

    Raises:
        UsageError: tells which.
    """
    for number, argument in enumerate(arguments, start=1):
        if len(argument) > MAX_TEXT_CHARS:
            raise UsageError(
                f"argument {number} has {len(argument):,} characters: {masked_argument(argument)[:40]}...",
                remedy=f"The most is {MAX_TEXT_CHARS:,}; write long values into a YAML file, preset=FILE.yaml.",
            )
        if not is_text(argument):
            raise UsageError(
                f"argument {number} is no text in UTF-8: {masked_argument(argument)!r}", remedy="Rename the file."
            )


def _dispatch(arguments: list[str]) -> int:
    check_arguments(arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    name, *rest = arguments
    if name in ("version", "--version"):
        print(f"realrl {VERSION}")
        return 0
    if name in COMMANDS:
        _require_working_directory()
        module, function = COMMANDS[name].split(":")
        code: int = getattr(importlib.import_module(module), function)(rest)
        return code
    if name.startswith("-"):
        raise UsageError(f"unknown option {name}", remedy="See: realrl --help")
    raise UsageError(f"unknown command '{name}'.{_meant(name)}", remedy="See: realrl --help")


@contextlib.contextmanager
def leaving_on_ctrl_c() -> Iterator[None]:
    """Leave at once on Ctrl-C: an exception in the middle of an import would come out of it as something else.

    Nothing is running yet; code that starts processes (`realrl.runtime.processes.supervise`) takes the signal over.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    loading = sys.modules.get("realrl.experiment.loading")  # there when code of users runs
    place = loading and loading.place_of_user(frame)
    os.write(2, f"realrl: interrupted{f' in {place}' if place else ''}\n".encode(errors="backslashreplace"))
    _exit(INTERRUPTED)


def open_closed_streams() -> None:
    """Open streams that were closed at the start (``>&-``) on /dev/null, so that nothing is read or shown.

    Left closed, their numbers would go to the next files that are opened, and prints would end up in those. What
    the terminal's encoding lacks is escaped.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
            os.set_inheritable(null, True)
            setattr(sys, name, open(descriptor, "r" if descriptor == 0 else "w"))  # noqa: SIM115 - for the whole process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _require_working_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder was removed", remedy="Change to a folder that exists.") from error


def _meant(name: str) -> str:
    """Return a hint: a close command, or the command that was left out before an experiment."""
    from realrl.experiment.discovery import experiment_names

    if name in experiment_names() or name.endswith(".py"):
        return f" Did you mean 'realrl run {name}'?"
    return did_you_mean(name, [*COMMANDS, "version"])
