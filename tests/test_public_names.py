"""Names that `import realrl` offers, and seconds that it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import realrl

PUBLIC = [
    "ActionBatch",
    "CallContext",
    "DatasetKind",
    "Experiment",
    "ForwardOutput",
    "GenerationResult",
    "InterfaceRef",
    "InterfaceType",
    "KeySchema",
    "LossOutput",
    "MFCDef",
    "MasterWorker",
    "Model",
    "ModelInterface",
    "ModelName",
    "ModelWorker",
    "Moments",
    "OffloadHook",
    "PPOOptions",
    "ParamReallocHook",
    "Per",
    "PolicyActor",
    "PolicyLoss",
    "PolicyOptions",
    "Role",
    "Rollout",
    "RunConfig",
    "RunResult",
    "Section",
    "SequenceSample",
    "__version__",
    "build_graph",
    "key",
    "load",
    "register_interface",
    "register_piece",
    "register_protocol",
    "response_mask",
    "run",
    "to_transitions",
    "train_minibatches",
    "whiten",
]


def test_public_names_are_pinned() -> None:
    assert sorted(realrl.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(realrl))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists(name: str) -> None:
    value = getattr(realrl, name)
    assert value == "0.1.0" if name == "__version__" else value.__name__ == name


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'realrl' has no attribute 'Nothing'"):
        _ = realrl.Nothing


def test_importing_is_cheap() -> None:
    script = """
import sys, time
start = time.process_time()
import realrl
print(time.process_time() - start, sorted({"torch", "pydantic", "networkx", "hydra", "numpy"} & set(sys.modules)))
"""
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    seconds, heavy = output.split(" ", 1)
    assert heavy.strip() == "[]"
    assert float(seconds) < 0.05
