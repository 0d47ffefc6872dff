"""What an experiment is made of, and what a run of it is."""

from realrl.data.kinds import DatasetKind as DatasetKind
from realrl.experiment.declaration import Experiment as Experiment
from realrl.experiment.declaration import Role as Role
