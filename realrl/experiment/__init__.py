"""Experiments: their declaration, their parts, and the plan of a run."""

from realrl.data.kinds import DatasetKind as DatasetKind
from realrl.experiment.declaration import Experiment as Experiment
from realrl.experiment.declaration import Role as Role
