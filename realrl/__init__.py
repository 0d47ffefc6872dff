"""realrl: a declarative dataflow-graph runtime for RLHF.

Public names are imported when they are first used, so that ``import realrl`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from realrl.version import VERSION

if TYPE_CHECKING:
    from realrl.algo.api import CallContext as CallContext
    from realrl.algo.api import ForwardOutput as ForwardOutput
    from realrl.algo.api import GenerationResult as GenerationResult
    from realrl.algo.api import LossOutput as LossOutput
    from realrl.algo.api import Model as Model
    from realrl.algo.api import ModelInterface as ModelInterface
    from realrl.algo.normalise import Moments as Moments
    from realrl.algo.normalise import whiten as whiten
    from realrl.algo.packed import response_mask as response_mask
    from realrl.algo.packed import to_transitions as to_transitions
    from realrl.algo.policy.actor import PolicyActor as PolicyActor
    from realrl.algo.policy.policy_losses import ActionBatch as ActionBatch
    from realrl.algo.policy.policy_losses import PolicyLoss as PolicyLoss
    from realrl.algo.policy.rollout import Rollout as Rollout
    from realrl.algo.training import train_minibatches as train_minibatches
    from realrl.config.policy_options import PolicyOptions as PolicyOptions
    from realrl.config.policy_options import PPOOptions as PPOOptions
    from realrl.config.schema import RunConfig as RunConfig
    from realrl.config.schema import Section as Section
    from realrl.config.schema import key as key
    from realrl.data.kinds import DatasetKind as DatasetKind
    from realrl.data.sample import SequenceSample as SequenceSample
    from realrl.experiment.declaration import Experiment as Experiment
    from realrl.experiment.declaration import Role as Role
    from realrl.experiment.pieces import register_piece as register_piece
    from realrl.experiment.registry import register_interface as register_interface
    from realrl.graph.build import build_graph as build_graph
    from realrl.graph.mfc import InterfaceRef as InterfaceRef
    from realrl.graph.mfc import InterfaceType as InterfaceType
    from realrl.graph.mfc import MFCDef as MFCDef
    from realrl.graph.mfc import ModelName as ModelName
    from realrl.graph.mfc import OffloadHook as OffloadHook
    from realrl.graph.mfc import ParamReallocHook as ParamReallocHook
    from realrl.plan.protocols import register_protocol as register_protocol
    from realrl.python.result import RunResult as RunResult
    from realrl.python.result import load as load
    from realrl.python.run import run as run
    from realrl.runtime.master.master_worker import MasterWorker as MasterWorker
    from realrl.runtime.worker.model_worker import ModelWorker as ModelWorker
    from realrl.sched.messages import KeySchema as KeySchema
    from realrl.sched.messages import Per as Per

__version__ = VERSION

_HOMES = {
    "ActionBatch": "realrl.algo.policy.policy_losses",
    "CallContext": "realrl.algo.api",
    "DatasetKind": "realrl.data.kinds",
    "Experiment": "realrl.experiment.declaration",
    "ForwardOutput": "realrl.algo.api",
    "GenerationResult": "realrl.algo.api",
    "InterfaceRef": "realrl.graph.mfc",
    "InterfaceType": "realrl.graph.mfc",
    "KeySchema": "realrl.sched.messages",
    "LossOutput": "realrl.algo.api",
    "MFCDef": "realrl.graph.mfc",
    "MasterWorker": "realrl.runtime.master.master_worker",
    "Model": "realrl.algo.api",
    "ModelInterface": "realrl.algo.api",
    "ModelName": "realrl.graph.mfc",
    "ModelWorker": "realrl.runtime.worker.model_worker",
    "Moments": "realrl.algo.normalise",
    "OffloadHook": "realrl.graph.mfc",
    "ParamReallocHook": "realrl.graph.mfc",
    "PPOOptions": "realrl.config.policy_options",
    "Per": "realrl.sched.messages",
    "PolicyActor": "realrl.algo.policy.actor",
    "PolicyLoss": "realrl.algo.policy.policy_losses",
    "PolicyOptions": "realrl.config.policy_options",
    "Role": "realrl.experiment.declaration",
    "Rollout": "realrl.algo.policy.rollout",
    "RunConfig": "realrl.config.schema",
    "RunResult": "realrl.python.result",
    "Section": "realrl.config.schema",
    "SequenceSample": "realrl.data.sample",
    "build_graph": "realrl.graph.build",
    "key": "realrl.config.schema",
    "load": "realrl.python.result",
    "register_interface": "realrl.experiment.registry",
    "register_piece": "realrl.experiment.pieces",
    "register_protocol": "realrl.plan.protocols",
    "response_mask": "realrl.algo.packed",
    "run": "realrl.python.run",
    "to_transitions": "realrl.algo.packed",
    "train_minibatches": "realrl.algo.training",
    "whiten": "realrl.algo.normalise",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'realrl' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
