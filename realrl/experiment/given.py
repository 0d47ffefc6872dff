"""Objects that `realrl.run` was given and that only this process has: experiments and functions of a notebook.

In the configuration a function is called ``realrl.experiment.given:NAME``, an experiment ``given:NAME``. Another
process finds nothing under these names, so that only runs inside this one (``launcher=inline``) can have them.
"""

from __future__ import annotations

from realrl.errors import ConfigError

EXPERIMENT_PREFIX = "given:"
_experiments: dict[str, object] = {}
_functions: dict[str, object] = {}


def give_experiment(name: str, experiment: object) -> str:
    """Keep an experiment, in the place of one of the same name, and return the reference to it."""
    _experiments[name] = experiment
    return EXPERIMENT_PREFIX + name


def give_function(name: str, function: object) -> str:
    """Keep a function, in the place of one of the same name, and return the reference to it."""
    _functions[name] = function
    return f"{__name__}:{name}"


def given_experiment(reference: str) -> object:
    """Return the experiment behind a reference.

    Raises:
        ConfigError: this process was not given it.
    """
    name = reference.removeprefix(EXPERIMENT_PREFIX)
    if name not in _experiments:
        raise ConfigError(
            f"experiment '{name}' was an object of a Python session that is over",
            remedy="Save it as a file, such as ./my_algorithm.py, and name that.",
        )
    return _experiments[name]


def __getattr__(name: str) -> object:
    try:
        return _functions[name]
    except KeyError:
        raise AttributeError(f"no function {name!r} was given to realrl.run in this process") from None
