"""``realrl plan``: the best plan for a run on given machines; and the plans that other commands make or read."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from realrl.cli.machines import kernels_here, settled_for, worker_memory
from realrl.cli.plan_found_view import Line, head_of_file, print_found, print_short
from realrl.cli.plan_questions import add_questions, answer, check_questions
from realrl.cli.unused import check_used
from realrl.errors import AllocationError, ConfigError, UsageError, did_you_mean
from realrl.files import why_no_output, write_output
from realrl.runtime.launchers.base import available_cores

if TYPE_CHECKING:
    import argparse

    from realrl.config.schema import RunConfig
    from realrl.experiment.declaration import Experiment
    from realrl.planner.evaluate import Evaluated
    from realrl.planner.plan_file import PlanFile
    from realrl.planner.planner import Effort, Planned, Planning
    from realrl.planner.request import Request

EXAMPLES = """\
examples:
  realrl plan ppo preset=tiny cluster.n_devices_per_node=2           two workers on CPUs
  realrl plan ppo ... cluster.n_nodes=16 cluster.n_devices_per_node=8 --hardware h100 --out plan.yaml
  realrl run ppo ... plan=plan.yaml                                  run it; also doctor, graph, simulate
  realrl plan ppo ... allocation.calls.actor_gen=d8t2@0-1            one call is where you say, or has a strategy
  realrl plan ppo ... --lengths 'prompt=fixed:256 response=lognormal:400,0.6'
  realrl plan ppo ... --method hybridflow                            the plan of another system

A setting that you give is kept: n_mbs, models.actor.optimizer.zero_stage, allocation.offload, ... Ctrl-C ends the
search with the best plan so far. Nothing is started.
"""
INTERRUPTED = 130
PLAN_FILE = "plan.yaml"
_AUTO_S = 20.0  # of a search before a run
_MOST_PROCESSES, _FEW_DEVICES = 4, 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--hardware", metavar="NAME", help="the machine: a name of configs/hardware, or a file")
    add("--lengths", metavar="TEXT", help="lengths of prompts and responses: distributions, or a generations.jsonl")
    add("--method", metavar="NAME", help="the plan of another system, in the place of the best one")
    add("--seed", metavar="N", type=int, default=1, help="where the search starts; default: 1")
    add("--seconds", metavar="S", type=float, default=240.0, help="end the search after that time; default: 240")
    add("--top", metavar="N", type=int, default=4, help="plans of the search to tell about; default: 4")
    add("--out", metavar="FILE", help="write the plan there, for plan=FILE")
    add_questions(parser)


def plan_run_command(
    experiment: Experiment, config: RunConfig, options: argparse.Namespace, arguments: Sequence[str]
) -> int:
    """Search, print what was found, and write it where that is wanted; returns the exit code.

    Args:
        arguments: overrides of the command line.

    Raises:
        UsageError: the input is wrong, or nothing fits.
    """
    from realrl.planner.planner import Effort, Planning

    _check_options(config, options, arguments)
    request = request_of(experiment, config, options.hardware, options.lengths, arguments)
    check_used(arguments, request.base)
    files = check_questions(request, options, read=_plan_in_file)
    effort = Effort(n_confirmed=options.top, seconds=options.seconds, n_processes=_n_processes(request))
    line = Line(sys.stdout)

    def search(other: Request) -> Evaluated:
        return _finished(Planning(other, seed=options.seed, effort=effort), line).best

    planned: Planned | None
    was_interrupted = False
    with _telling_shortage(request):
        if options.method is not None:
            planned = _plan_of_method(request, options.method, options.seed)
        else:
            planned, was_interrupted = _search(Planning(request, seed=options.seed, effort=effort), line)
    if planned is None:
        print("realrl: interrupted before a plan was found", file=sys.stderr)
        return INTERRUPTED
    saved = _save(planned, options)  # first of all: what reads the output, such as head, may end before it does
    print_found(planned)
    if options.method is None and not was_interrupted:
        _tell_if_slow(planned)
    print(saved)
    if not was_interrupted:
        answer(planned, options, search=search, files=files)
    if was_interrupted:
        print("realrl: interrupted: this is the best plan so far", file=sys.stderr)
    return INTERRUPTED if was_interrupted else 0


def request_of(
    experiment: Experiment, config: RunConfig, hardware: str | None, lengths: str | None, arguments: Sequence[str]
) -> Request:
    """Return what a command line asks for.

    Args:
        hardware, lengths: values of the options.
        arguments: overrides of the command line.

    Raises:
        UsageError: the machine, the lengths or the run cannot be used.
    """
    from realrl.planner.modelled import hardware_for
    from realrl.planner.request import Request, with_pinned_stages

    config = with_pinned_stages(settled_for(config, hardware))
    machine = hardware_for(config, hardware)
    given = frozenset(_given_keys(experiment, arguments))
    return Request(experiment, config, machine, lengths, given, kernels_here, worker_memory(config, machine))


def file_of_plan(arguments: Sequence[str]) -> PlanFile | None:
    """Read the plan that an override ``plan=FILE`` names; None if there is none.

    Raises:
        ConfigError: it is no plan.
    """
    if not any(argument.lstrip("+").startswith("plan=") for argument in arguments):
        return None
    from realrl.config.overrides import parse_overrides
    from realrl.planner.plan_file import read_plan

    named = [edit.text for edit in parse_overrides(arguments)[0] if edit.path == "plan"]
    return read_plan(named[-1], source=f"plan={named[-1]}") if named and named[-1] else None


def plan_now(experiment: Experiment, config: RunConfig, arguments: Sequence[str]) -> tuple[RunConfig, str]:
    """Return the configuration of `allocation=auto` with its plan, and the content of the plan's file.

    A run that is resumed keeps the plan in its folder. On one device there is nothing to plan, and no file.

    Raises:
        UsageError: the machine is not known, nothing fits, or the folder's plan is one for something else.
    """
    if config.cluster.n_nodes * config.cluster.n_devices_per_node == 1:
        allocation = config.allocation.model_copy(update={"mode": "data"})
        return config.model_copy(update={"allocation": allocation}), ""
    kept = Path(config.run_dir) / PLAN_FILE
    if config.run_dir and config.resume != "never" and kept.is_file():
        print(f"allocation=auto: the plan in {kept}")
        return _kept_plan(experiment, config, kept)
    if config.run_dir and config.resume != "never" and kept.parent.is_dir():
        print(f"allocation=auto: there is no {kept}; planning anew")
    from realrl.planner.planner import Effort

    request = request_of(experiment, config, None, None, arguments)
    effort = Effort(n_expanded=2000, n_confirmed=2, seconds=_AUTO_S, n_processes=_n_processes(request))
    planned = search_for(request, effort=effort)
    print_short(planned)
    return planned.best.settings.applied(config), plan_file_text(planned, seed=1)


def search_for(request: Request, *, effort: Effort, seed: int = 1) -> Planned:
    """Search to the end.

    Raises:
        UsageError: nothing fits; the message says what devices lack.
    """
    from realrl.planner.planner import Planning

    with _telling_shortage(request):
        return _finished(Planning(request, seed=seed, effort=effort), Line(sys.stdout))


def plan_file_text(planned: Planned, *, seed: int) -> str:
    """Return the content of the file of the best plan."""
    from realrl.planner.plan_file import holds_for, plan_text

    best, request = planned.best, planned.request
    made = {
        "method": best.name,
        "seed": seed,
        "hardware": request.hardware.name,
        "lengths": request.lengths or "; ".join(request.drawn[1]),
        "period_s": float(f"{best.period_s:.6g}"),
        "bound_s": float(f"{planned.bound_s:.6g}"),
    }
    holds = holds_for(request.config, request.experiment, request.base.mfcs, request.models)
    return plan_text(best.settings, holds, made, head_of_file(planned))


# ---------------------------------------------------------------- parts


def _kept_plan(experiment: Experiment, config: RunConfig, path: Path) -> tuple[RunConfig, str]:
    """Return the configuration of a run that is resumed with the plan in its folder, and the content of that file.

    Raises:
        ConfigError: it is damaged, made for something else, or not what the user has pinned.
    """
    from realrl.planner.plan_file import check_holds, check_pins, read_plan

    settled = settled_for(config, None)
    try:
        plan = read_plan(str(path), source=f"allocation=auto: {path}")
        check_holds(plan, settled, experiment)
        check_pins(plan, settled)
    except ConfigError as error:
        remedy = f"Resume with the settings of the run, or remove {path} to plan anew."
        raise ConfigError(error.message, remedy=remedy) from error
    return plan.settings.applied(config), path.read_text()


def _check_options(config: RunConfig, options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Refuse what cannot be before anything is searched."""
    from realrl.config.overrides import parse_overrides

    given = {edit.path: edit for edit in parse_overrides(arguments)[0]}
    for path in ("allocation", "allocation.mode"):
        if path in given and given[path].text not in ("auto", "manual"):
            raise ConfigError(
                f"{given[path].subject}: realrl plan decides where calls run",
                remedy="Leave it out. Pin single calls with allocation.calls.CALL=d8@0:0-7.",
            )
    if config.plan:
        raise ConfigError(
            f"plan={config.plan}: realrl plan makes a plan", remedy="Leave it out; 'realrl simulate' judges one."
        )
    if not options.seconds > 0:
        raise UsageError(f"--seconds {options.seconds:g} is no time to search", remedy="Give more than 0.")
    if options.top < 1:
        raise UsageError(f"--top {options.top}: at least one plan is needed")
    if options.out is not None:
        out = Path(options.out)
        reason = why_no_output(out)
        if not reason and not out.absolute().parent.is_dir():
            reason = "its folder does not exist"
        if reason:
            raise ConfigError(f"--out {out} cannot be written: {reason}", remedy="Choose another file.")


def _tell_if_slow(planned: Planned) -> None:
    """Say so if a search that has not looked at all plans could have looked at more with a compiler."""
    from realrl.graph.build import calls
    from realrl.search.local.compiled import why_not_compiled

    reason = "" if planned.is_done else why_not_compiled(len(calls(planned.request.base.graph)))
    if reason:
        print(f"the search is not compiled, and has looked at fewer plans: {reason}")


def _given_keys(experiment: Experiment, arguments: Sequence[str]) -> Iterator[str]:
    """Yield the paths that the command line sets, those of ``models.*`` for every role."""
    from collections.abc import Mapping

    from realrl.config.overrides import parse_overrides

    def leaves(path: str, value: object) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from leaves(f"{path}.{key}", inner)
        else:
            yield path

    for edit in parse_overrides(arguments)[0]:
        for path in leaves(edit.path, edit.value):
            if path.startswith("models.*."):
                yield from (path.replace("*", role, 1) for role in experiment.roles)
            else:
                yield path


def _plan_of_method(request: Request, name: str, seed: int) -> Planned:
    """Return the plan of another system, as it is.

    Raises:
        UsageError: there is no such method, or its plan does not fit.
    """
    from realrl.planner.evaluate import evaluate, why_not
    from realrl.planner.planner import Planned
    from realrl.planner.study import Study
    from realrl.search.methods import METHODS

    if name not in METHODS:
        raise UsageError(
            f"--method {name}: there is no such method.{did_you_mean(name, METHODS)}",
            remedy=f"Choose from {', '.join(METHODS)}.",
        )
    settings = Study(request, seed).settings_by(name)
    found: Evaluated = evaluate(request, settings, name=name)
    if not found.fits:
        raise AllocationError(f"the plan of {name} does not fit: {why_not(request, settings)}")
    return Planned(request, (found,), {}, 0.0, False)


def _plan_in_file(request: Request, path: str) -> Evaluated:
    """Return the plan of a file.

    Raises:
        UsageError: it is no plan for this run, or a run would refuse it.
    """
    from realrl.planner.evaluate import evaluate
    from realrl.planner.plan_file import check_holds, read_plan

    plan = read_plan(path, source=f"--compare {path}")
    check_holds(plan, request.config, request.experiment)
    return evaluate(request, plan.settings, name=path)


def _finished(planning: Planning, line: Line, check: Callable[[], None] = lambda: None) -> Planned:
    """Search to the end.

    Args:
        check: called after each step.

    Raises:
        AllocationError: nothing fits.
    """
    with closing(planning.run()) as states:
        for progress in states:
            line.show(progress)
            check()
    line.clear()
    planned = planning.result()
    if planned is None:
        raise AllocationError("no plan that was found fits the devices exactly", remedy="Give more --seconds.")
    return planned


def _search(planning: Planning, line: Line) -> tuple[Planned | None, bool]:
    """Search until it ends or Ctrl-C is typed; returns what was found, and True if it was interrupted.

    Raises:
        AllocationError: nothing fits.
    """
    try:
        with _interruptible() as check:
            return _finished(planning, line, check), False
    except KeyboardInterrupt:
        line.clear()
        print("realrl: interrupted: simulating the best plan so far; Ctrl-C again ends at once", file=sys.stderr)
        return planning.result(quickly=True), True


@contextmanager
def _telling_shortage(request: Request) -> Iterator[None]:
    """Say what devices lack, where no plan fits because of that."""
    try:
        yield
    except AllocationError as refused:
        from realrl.planner.shortage import find_shortage
        from realrl.profiler.hardware_files import hardware_names, named_hardware

        try:
            shortage = find_shortage(request, {name: named_hardware(name) for name in hardware_names()})
        except UsageError:  # there is no plan of any size
            raise refused from None
        if shortage is None:
            raise
        raise shortage.error from None


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C raise `KeyboardInterrupt`, where it else ends the process at once.

    The function that is yielded raises it again, as code of a library may lose the first one.
    """
    before, is_typed = signal.getsignal(signal.SIGINT), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_typed
        is_typed = True
        signal.default_int_handler(number, frame)

    def check() -> None:
        if is_typed:
            raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not in the main thread, which gets no signals then
        yield check
        return
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def _n_processes(request: Request) -> int:
    """Return how many processes plan; their start takes longer than few devices are worth."""
    return min(available_cores(), _MOST_PROCESSES) if request.cluster.n_devices > _FEW_DEVICES else 1


def _save(planned: Planned, options: argparse.Namespace) -> str:
    """Write the plan where that is wanted; return a line about it."""
    if options.out is None:
        return "Nothing was written; --out FILE saves the plan, for: realrl run ... plan=FILE"
    try:
        write_output(options.out, plan_file_text(planned, seed=options.seed).encode())
    except OSError as error:
        raise ConfigError(f"--out {options.out} cannot be written: {error.strerror}") from error
    return f"wrote {options.out}; use it with plan={options.out}"
