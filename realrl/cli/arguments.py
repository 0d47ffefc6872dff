"""Arguments of the commands: options, the experiment, and the configuration that follows from its overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from realrl.cli.clusters.jobs import machines_of_job
from realrl.cli.config_view import print_config
from realrl.cli.plan import file_of_plan
from realrl.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from realrl.config.schema import RunConfig
    from realrl.experiment.declaration import Experiment


class Parser(argparse.ArgumentParser):
    """argparse, with errors of ours and no abbreviations."""

    def __init__(self, **settings: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"See: {self.prog} --help")


def make_parser(command: str, description: str, examples: str) -> Parser:
    """Return the parser of a command, with the options that all of them have."""
    parser = Parser(
        prog=f"realrl {command}",
        usage=f"realrl {command} NAME [key=value ...] [options]",
        description=description,
        epilog=examples,
        add_help=False,
    )
    parser.set_defaults(command=command)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("-h", "--help", action="store_true", help="this text; 'realrl run NAME --help' lists the keys")
    return parser


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse options, which may stand before, between and after overrides."""
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        meant = _setting_like(unknown[0]) or did_you_mean(unknown[0], flags)
        raise UsageError(f"unknown option {unknown[0]}.{meant}", remedy=f"See: {parser.prog} --help")
    return options


def _setting_like(option: str) -> str:
    """Return a hint where an option is a setting with dashes before it; else an empty string."""
    from realrl.config.schema import RunConfig  # pydantic costs every command tenths of a second

    name, _, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if name.partition(".")[0] not in RunConfig.model_fields:
        return ""
    return f" It is a setting, which has no dashes: {name}={value or '...'}"


def load(parser: Parser, options: argparse.Namespace) -> tuple[Experiment, RunConfig]:
    """Return the experiment that the arguments name, and its configuration."""
    experiment = load_named(parser, options)
    return experiment, compose_run(experiment, options.arguments)


def load_named(parser: Parser, options: argparse.Namespace) -> Experiment:
    """Return the experiment that the arguments name.

    Raises:
        UsageError: they name none.
    """
    from realrl.experiment.discovery import experiment_names, load_experiment

    if not options.arguments:
        raise UsageError(f"{parser.prog} needs an experiment", remedy=f"Choose from {', '.join(experiment_names())}.")
    name = options.arguments[0]
    if "=" in name:
        raise UsageError(f"the experiment comes before '{name}'", remedy=f"Write: {parser.prog} NAME {name}")
    return load_experiment(name)


def compose_run(experiment: Experiment, arguments: Sequence[str]) -> RunConfig:
    """Compose the configuration of an experiment from the user's name for it and overrides."""
    from realrl.config.compose import compose
    from realrl.config.paths import with_hub_names
    from realrl.data.assets.store import hub_dir
    from realrl.experiment.discovery import config_dir, stable_reference
    from realrl.experiment.loading import staying
    from realrl.files import cache_dir

    plan = file_of_plan(arguments[1:])
    if plan is not None:
        from realrl.planner.plan_file import check_experiment, check_holds

        check_experiment(plan, experiment)
    with staying():
        config = compose(
            experiment,
            arguments[1:],
            reference=stable_reference(arguments[0]),
            config_dir=config_dir(),
            cache_dir=cache_dir().absolute(),
            plan=None if plan is None else plan.layer,
            n_machines=machines_of_job(),
        )
    config = with_hub_names(config, hub_dir())
    if plan is not None:
        check_holds(plan, config, experiment)
    return config


def print_help(parser: Parser, options: argparse.Namespace) -> int:
    """Print the help of a command, and the keys of the experiment if one is named."""
    parser.print_help()
    if options.arguments:
        experiment, config = load(parser, options)
        print()
        print_config(experiment, config)
    return 0
