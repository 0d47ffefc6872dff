"""The commands, each a function from its arguments to an exit code."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from realrl.cli import check_arguments
from realrl.cli.arguments import Parser, compose_run, load, load_named, make_parser, parse, print_help
from realrl.cli.clusters.doctor import ask_machines, print_machines
from realrl.cli.config_view import print_config
from realrl.cli.console import print_table
from realrl.cli.doctor_view import print_report, write_report
from realrl.cli.fuse import EXAMPLES as FUSE_EXAMPLES
from realrl.cli.fuse import add_options as add_fuse_options
from realrl.cli.fuse import fuse_file, fuse_run
from realrl.cli.launch import checked, decide_overlap, foresee_overlap, plan_of, refuse_unnamed, start
from realrl.cli.machines import memory_of, settle
from realrl.cli.plan import EXAMPLES as PLAN_EXAMPLES
from realrl.cli.plan import add_options as add_plan_options
from realrl.cli.plan import plan_run_command
from realrl.cli.plan_questions import settle_explain
from realrl.cli.plan_view import print_graph
from realrl.cli.simulate import add_options, read_recording, simulate_run
from realrl.cli.sweep import add_options as add_sweep_options
from realrl.cli.sweep import sweep
from realrl.errors import UsageError

if TYPE_CHECKING:
    from realrl.config.schema import RunConfig
    from realrl.experiment.declaration import Experiment
    from realrl.experiment.run_plan import RunPlan
    from realrl.sched.master.master_plan import MasterPlan

RUN_EXAMPLES = """\
examples:
  realrl run ppo preset=tiny                             PPO on a toy task, no download
  realrl run ppo preset=tiny steps=5 --dry-run           show the plan, start nothing
  realrl run ppo --help                                  every key of this experiment
  realrl run ./my_algorithm.py preset=tiny               an algorithm of your own
  realrl run ppo 'generation.stop_ids=[2,3]'             a list; quote what the shell would read
  realrl run ppo cluster.n_devices_per_node=2 allocation.calls.rew_inf=d1@0:1   one call on device 1 of node 0
  realrl run ppo run_dir=runs/a resume=auto              continue after an interruption
  realrl run ppo preset=tiny lr=1e-4,1e-3 seed=1,2 --sweep     four runs, a table and a report of all
  realrl run ppo ... launcher=slurm cluster.n_nodes=2 --sbatch FILE   a script for SLURM; see docs/clusters.md

exit codes: 0 done, 1 the run failed, 2 wrong input and nothing was started, 130 interrupted (Ctrl-C: the step under way
is finished and saved, and how to continue is told; a second one stops at once), 75 machines are missing or wanted back
"""
GRAPH_EXAMPLES = """\
examples:
  realrl graph ppo
  realrl graph ppo --out ppo.svg                         also .png, .mmd (mermaid) and .html
  realrl graph ppo cluster.n_devices_per_node=2 allocation=split --out ppo.html
"""
GEN_EXAMPLES = """\
examples:
  realrl gen preset=tiny --out responses.jsonl           the built-in model and prompts
  realrl gen models.actor.path=/models/llama dataset.path=prompts.jsonl generation.n_responses=4 --out responses.jsonl
  realrl gen algorithm.reward_function=math_verify dataset.path=problems.jsonl ...   with rewards

Goes once over all prompts. NAME is an experiment that trains nothing; left out, it is 'gen'.
"""
EVAL_EXAMPLES = """\
examples:
  realrl eval grpo preset=tiny                           the built-in model on held-out prompts
  realrl eval grpo models.actor.path=runs/a/checkpoints/step_40/actor eval.path=test.jsonl
  realrl eval grpo eval.n_responses=8 eval.temperature=1 ...   pass@1, 2, 4 and 8
  realrl eval sft models.actor.path=... eval.path=...    loss and perplexity
  realrl eval rw models.reward.path=... eval.path=...    accuracy on pairs

Results with standard errors are printed and written to eval.json in the run folder. During training:
realrl run NAME eval.every_steps=10 eval.path=FILE.
"""
DOCTOR_EXAMPLES = """\
examples:
  realrl doctor ppo preset=tiny
  realrl doctor ppo models.actor.path=/models/llama dataset.path=prompts.jsonl cluster.n_devices_per_node=8
  realrl doctor ppo ... cluster.device=cuda --device-memory 80   a plan for other machines than this one
  realrl doctor ppo ... launcher=external cluster.n_nodes=2 --nodes   also asks the machines that join
  realrl doctor ppo ... --json report.json               all numbers

exit codes: 0 nothing stands in the way, 2 wrong input, or the run would be refused or fail
"""
SIMULATE_EXAMPLES = """\
examples:
  realrl simulate ppo preset=tiny                        its calls, and what bounds a step, on two cores
  realrl simulate ppo ... cluster.n_nodes=16 cluster.n_devices_per_node=8 --hardware h100
  realrl simulate ppo ... --lengths 'prompt=fixed:256 response=lognormal:400,0.6'
  realrl simulate ppo --against runs/a                   with the durations of a run: the error of the scheduler
  realrl simulate ppo --against runs/a --hardware two_cores   a prediction, compared with the run
  realrl simulate ppo --against runs/a --slow 1=2        if device 1 took twice as long
  realrl simulate ppo --against runs/a --kill 0@30       if worker 0 died after 30 s
  realrl simulate ppo --against runs/a --out predicted   metrics.jsonl and trace.json, as a run writes them

With --against, settings that are left out are those of the run. Nothing is started: the real scheduler runs on a clock
of its own.
"""
PROFILE_EXAMPLES = """\
examples:
  realrl profile ppo preset=tiny                         writes hardware.yaml
  realrl profile ppo preset=quickstart --out two_workers.yaml
  realrl profile sft models.actor.path=/models/llama cluster.n_devices_per_node=8 --seconds 600
  realrl profile ppo preset=tiny --measurements tiny.json      keep what was measured
  realrl profile ppo --from tiny.json --from smollm2.json      one file for several models; nothing is measured

As many workers as the run has compute at the same time; the file holds for as many on such a machine. Models are cut to
fewer blocks where the memory is too small. Nothing else should run meanwhile.
"""
CONFIG_EXAMPLES = """\
examples:
  realrl config ppo                                      the defaults
  realrl config ppo preset=tiny                          the values with this preset
"""


def run(arguments: Sequence[str]) -> int:
    """``realrl run``: train, or show the plan."""
    parser = make_parser("run", "Train as an experiment declares.", RUN_EXAMPLES)
    _add_dry_run(parser)
    add_sweep_options(parser)
    options = parse(parser, arguments)
    if options.help:
        return print_help(parser, options)
    if options.sweep or options.jobs is not None:
        return _sweep(parser, options)
    return start(*load(parser, options), options)


def run_settings(reference: str, settings: Mapping[str, object] | Sequence[str], opened: Callable[[Path], None]) -> int:
    """Do what ``realrl run`` does, with settings of Python; returns its exit code.

    Args:
        reference: name of an experiment.
        settings: see `realrl.config.words`.
        opened: gets the run folder.

    Raises:
        UsageError: the run is refused; nothing was started.
    """
    from realrl.config.keys import known_keys
    from realrl.config.words import words_of
    from realrl.experiment.discovery import load_experiment

    experiment = load_experiment(reference)
    arguments = [reference, *words_of(settings, known_keys(experiment))]
    check_arguments(arguments)
    options = argparse.Namespace(arguments=arguments, dry_run=False, hardware=None, sbatch=None, command="run")
    return start(experiment, compose_run(experiment, arguments), options, opened)


def _sweep(parser: Parser, options: argparse.Namespace) -> int:
    """Run every combination of values, after a check of all of them."""
    experiment = load_named(parser, options)
    name, *overrides = options.arguments
    from realrl.config.paths import check_paths
    from realrl.files import cache_dir

    seen: list[RunConfig] = []

    def check(words: Sequence[str]) -> RunConfig:
        config = compose_run(experiment, [name, *words])
        check_paths(config.model_copy(update={"resume": "never"}), cache_dir=cache_dir().absolute())
        refuse_unnamed(experiment, config, words)
        if config.allocation.mode != "auto":  # else each run finds a plan of its own
            alone, _ = settle(config.model_copy(update={"run_dir": "", "resume": "never"}), None)  # in its own folder
            plan = plan_of(experiment, alone, words)
            if not seen:
                checked(plan)
        seen.append(config)
        return config

    return sweep(name, overrides, check, options)


def gen(arguments: Sequence[str]) -> int:
    """``realrl gen``: responses to all prompts of a file."""
    parser = make_parser("gen", "Write responses to the prompts of a file, without training.", GEN_EXAMPLES)
    parser.usage = "realrl gen [NAME] [key=value ...] [options]"
    parser.add_argument("--out", metavar="FILE", help="where to write them; default: generations.jsonl in run_dir")
    _add_dry_run(parser)
    options = parse(parser, arguments)
    if not options.arguments or "=" in options.arguments[0]:
        options.arguments = ["gen", *options.arguments]
    if options.help:
        return print_help(parser, options)
    experiment, config = load(parser, options)
    if any(mfc.is_train for mfc in experiment.calls(config)):
        raise UsageError(
            f"experiment '{experiment.name}' trains, and 'realrl gen' does not",
            remedy="Use 'realrl gen models.actor.path=...', or 'realrl run' to train.",
        )
    if options.out is not None:
        save = config.save.model_copy(update={"generations_path": options.out})
        config = config.model_copy(update={"save": save})
    return start(experiment, config, options)


def evaluate(arguments: Sequence[str]) -> int:
    """``realrl eval``: evaluate models as a training run would."""
    parser = make_parser("eval", "Evaluate models on held-out data, without training.", EVAL_EXAMPLES)
    _add_dry_run(parser)
    options = parse(parser, arguments)
    if options.help:
        return print_help(parser, options)
    experiment, config = load(parser, options)
    only = config.eval.model_copy(update={"only": True})
    return start(experiment, config.model_copy(update={"eval": only}), options)


def _add_dry_run(parser: Parser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="resolve, check and print the plan; start nothing")
    parser.add_argument("--hardware", metavar="NAME", help="with --dry-run: the machine, in the place of this one")
    parser.add_argument(
        "--sbatch", metavar="FILE", help="with launcher=slurm: write a script for sbatch, start nothing"
    )


def doctor(arguments: Sequence[str]) -> int:
    """``realrl doctor``: the memory that a run needs of every device, and its problems."""
    parser = make_parser(
        "doctor", "Check a run, and the memory that it needs, before anything starts.", DOCTOR_EXAMPLES
    )
    parser.add_argument("--json", metavar="FILE", help="write the report there, too")
    parser.add_argument("--device-memory", metavar="GB", type=float, help="of each device; default: what is there")
    parser.add_argument("--hardware", metavar="NAME", help="the machine, in the place of this one: see realrl plan")
    parser.add_argument("--no-models", action="store_true", help="load no model: generation is not tried")
    parser.add_argument("--nodes", action="store_true", help="wait for the machines of the run, and ask them too")
    options = parse(parser, arguments)
    if options.help:
        return print_help(parser, options)
    if options.device_memory is not None and not 0 < options.device_memory < math.inf:
        raise UsageError(f"--device-memory {options.device_memory:g} is no size", remedy="Give it in 1e9 bytes.")
    from realrl.doctor.report import examine
    from realrl.doctor.run_under_check import RunUnderCheck

    experiment, config = load(parser, options)
    config, _ = settle(config, options.hardware)
    plan = plan_of(experiment, config, options.arguments[1:])
    refuse_unnamed(experiment, config, options.arguments[1:])

    def recompose(more: Sequence[str]) -> RunConfig:
        return settle(compose_run(experiment, [*options.arguments, *more]), options.hardware)[0]

    inspected = ask_machines(plan) if options.nodes else None
    memory = None if options.device_memory is None else int(options.device_memory * 1e9)
    if options.hardware is not None:
        memory = memory or memory_of(plan.config)
    run = RunUnderCheck(
        plan,
        recompose,
        device_memory_bytes=memory,
        loads_models=not options.no_models,
        is_elsewhere=options.hardware is not None,
        machine_memory_bytes=None if inspected is None else inspected.device_bytes,
    )
    report = examine(run)
    if inspected is not None:
        report = replace(report, findings=(*inspected.findings, *report.findings))
        print_machines(inspected.reports)
    print_report(report, plan)
    if options.json is not None:
        write_report(report, plan, options.json, machines=() if inspected is None else inspected.as_json())
    return UsageError.exit_code if report.has_problem else 0


def simulate(arguments: Sequence[str]) -> int:
    """``realrl simulate``: the time of a step, and what it is made of."""
    parser = make_parser("simulate", "Predict the time of a step and what bounds it; start nothing.", SIMULATE_EXAMPLES)
    add_options(parser)
    options = parse(parser, arguments)
    if options.help:
        parser.print_help()
        return 0
    from realrl.experiment.discovery import load_run

    if len(options.arguments) == 1 and options.against is not None:
        experiment, config = load(parser, options)
        recorded, of_run = load_run(read_recording(options.against).config)
        experiment, config = (recorded, of_run) if recorded.name == experiment.name else (experiment, config)
    else:
        experiment, config = load(parser, options)
    return simulate_run(experiment, config, options, make_plan=partial(_plan_of_master, options))


def find_plan(arguments: Sequence[str]) -> int:
    """``realrl plan``: the best plan for a run on given machines."""
    parser = make_parser("plan", "Find where each call of a run should be, and how it should run there.", PLAN_EXAMPLES)
    add_plan_options(parser)
    options = parse(parser, arguments)
    settle_explain(options)
    if options.help:
        parser.print_help()
        return 0
    experiment, config = load(parser, options)
    return plan_run_command(experiment, config, options, options.arguments[1:])


def fuse(arguments: Sequence[str]) -> int:
    """``realrl fuse``: a schedule in which several models train on the same devices at once."""
    parser = make_parser("fuse", "Find a schedule in which models fill each other's pipeline bubbles.", FUSE_EXAMPLES)
    parser.usage = "realrl fuse NAME|FILE.yaml [key=value ...] [options]"
    add_fuse_options(parser)
    options = parse(parser, arguments)
    if options.help:
        parser.print_help()
        return 0
    if options.arguments and options.arguments[0].endswith((".yaml", ".yml")):
        return fuse_file(options)
    experiment, config = load(parser, options)
    return fuse_run(experiment, config, options, make_plan=partial(_plan_with, options.arguments[1:]))


def _plan_with(words: Sequence[str], experiment: Experiment, config: RunConfig) -> RunPlan:
    return plan_of(experiment, config, words)


def _plan_of_master(
    options: argparse.Namespace, experiment: Experiment, config: RunConfig
) -> tuple[RunPlan, MasterPlan]:
    """Return the plan of a run and its master's, from the first step on."""
    from realrl.experiment.planning import check_models_fit
    from realrl.runtime.checkpoints.resume import make_master_plan
    from realrl.runtime.checkpoints.store import CHECKPOINTS, checkpoint_store

    plan = plan_of(experiment, config, options.arguments[1:])
    check_models_fit(plan)
    store = checkpoint_store(plan, Path(config.run_dir) / CHECKPOINTS)
    return plan, make_master_plan(plan, store, None, overlap=decide_overlap(plan))


def profile(arguments: Sequence[str]) -> int:
    """``realrl profile``: measure this machine, and write a hardware file."""
    parser = make_parser("profile", "Measure this machine for the models of an experiment.", PROFILE_EXAMPLES)
    parser.add_argument("--out", metavar="FILE", default="hardware.yaml", help="the file; default: hardware.yaml")
    parser.add_argument("--seconds", metavar="S", type=float, default=150.0, help="time to measure; default: 150")
    parser.add_argument("--hardware", metavar="NAME", default="", help="what is not measured; default: a like machine")
    parser.add_argument("--measurements", metavar="FILE", help="keep the raw measurements there, too")
    parser.add_argument("--from", metavar="FILE", action="append", dest="found", help="fit these; measure nothing")
    options = parse(parser, arguments)
    if options.help:
        return print_help(parser, options)
    if not 1 <= options.seconds <= 86400:
        raise UsageError(f"--seconds {options.seconds:g} is no time to measure", remedy="Give 1 to 86400 seconds.")
    from realrl.profiler.program import Settings
    from realrl.profiler.start import fit_again, profile_machine
    from realrl.runtime.processes.machine import accelerators, on_machine

    experiment, config = load(parser, options)
    if options.found:
        fit_again(options.found, options.out, options.hardware)
        return 0
    found = accelerators()
    plan = plan_of(experiment, on_machine(config, found)[0], options.arguments[1:])
    settings = Settings(options.seconds, options.hardware)
    return profile_machine(plan, options.out, settings, found, measurements=options.measurements)


def list_experiments(arguments: Sequence[str]) -> int:
    """``realrl list``: a table of the registered experiments."""
    parser = Parser(prog="realrl list", description="The registered experiments, their roles and their calls.")
    parser.parse_args(arguments)
    from realrl.config.compose import compose
    from realrl.experiment.discovery import list_experiments

    rows = []
    for experiment in list_experiments():
        calls = ", ".join(mfc.name for mfc in experiment.calls(compose(experiment)))
        rows.append((experiment.name, experiment.description, ", ".join(experiment.roles), calls))
    print_table(("name", "what it does", "roles", "calls"), rows, folding=("what it does", "roles", "calls"))
    return 0


def graph(arguments: Sequence[str]) -> int:
    """``realrl graph``: the dataflow graph as text, or as a picture with ``--out``."""
    parser = make_parser("graph", "Show the calls of an experiment and what flows between them.", GRAPH_EXAMPLES)
    parser.add_argument("--out", metavar="FILE", help="write a picture: .svg, .png, .mmd or .html")
    options = parse(parser, arguments)
    if options.help:
        parser.print_help()
        return 0
    plan = plan_of(*load(parser, options), options.arguments[1:])
    if options.out is None:
        print_graph(plan)
    else:
        from realrl.draw.picture import write_picture

        remarks = {call: f"parameters {note}" for call, note in foresee_overlap(plan).notes.items()}
        if plan.fusion is not None:
            remarks |= {call: f"together with {plan.fusion.partner_of(call)}" for call in plan.fusion.calls}
        path = write_picture(
            options.out,
            plan.graph,
            title=plan.experiment.name,
            allocations=plan.allocations,
            remarks=remarks,
        )
        print(f"wrote {path}")
    return 0


def config(arguments: Sequence[str]) -> int:
    """``realrl config``: every key with its value, its allowed values and its meaning."""
    parser = make_parser("config", "Every key of an experiment, its value and what it accepts.", CONFIG_EXAMPLES)
    options = parse(parser, arguments)
    if options.help:
        parser.print_help()
        return 0
    print_config(*load(parser, options))
    return 0
