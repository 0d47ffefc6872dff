"""A small model on one node, its roles and calls."""

from __future__ import annotations

import math

from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Cluster
from realrl.mesh.notation import parse_allocation
from realrl.plan.hooks import CallHooks
from realrl.plan.memory.buffers import PASS_ROW_BYTES
from realrl.plan.memory.formulas.local import local_shape
from realrl.plan.memory.load import Load, RowLengths
from realrl.plan.memory.plan import CallState, RoleState
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.shards import whole_shard
from realrl.shape import DecoderConfig

GENERATE, INFERENCE, TRAIN = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
NODE = Cluster(1, 8)
MODEL = DecoderConfig(
    vocab_size=64, hidden_size=32, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=4, intermediate_size=48
)
VECTORS = (4 * 4 + 2) * 32 * 4  # those that a pass converts
ROW = PASS_ROW_BYTES + 2 * 32 * 4 + VECTORS  # of one token while the embedding gets its gradient
TABLE = 64 * 32 * 4  # the largest parameter
N_BYTES = sum(spec.num_bytes for spec in parameter_specs(MODEL))
ROWS = RowLengths([5, 3, 9], [11, 6, 20], [11, 6, 20])
LOAD = Load(4, 64, 16)


def place(text):
    n = math.prod(int(text[i + 1]) for i, letter in enumerate(text) if letter in "dtp")
    return parse_allocation(f"{text}@0:0-{n - 1}" if n > 1 else f"{text}@0:0", NODE)


def role(text="d1", **changes):
    return RoleState(**{"model": MODEL, "home": place(text), "is_trained": True, **changes})


def call(kind, text="d1", *, name="call", of="actor", hooks=None, load=LOAD):
    return CallState(name, of, kind, place(text), hooks or CallHooks(), load)


def local(model=MODEL, **changes):
    return local_shape(model, whole_shard(model), sp=False, element_bytes=4, **changes)


def mfc(kind, **changes):
    return MFCDef(**{"name": "c", "model_name": "actor", "interface_type": kind, "interface_impl": "i", **changes})
