"""Models and hardware for tests of costs."""

from pathlib import Path

import yaml

from realrl.shape import DecoderConfig
from realrl.sim.hardware import Hardware, hardware_from

LLAMAS = {  # hidden, layers, heads, KV heads, inner
    "7B": (4096, 32, 32, 32, 11008),
    "13B": (5120, 40, 40, 40, 13824),
    "34B": (8192, 48, 64, 8, 22016),
    "70B": (8192, 80, 64, 8, 28672),
}


def llama(size="7B", **changes) -> DecoderConfig:
    hidden, layers, heads, kv_heads, inner = LLAMAS[size]
    shape = {
        "vocab_size": 32000, "hidden_size": hidden, "n_layers": layers, "n_heads": heads, "n_kv_heads": kv_heads,
        "head_dim": hidden // heads, "intermediate_size": inner, "max_positions": 4096, "dtype": "bfloat16",
    }  # fmt: skip
    return DecoderConfig(**(shape | changes))


def small(**changes) -> DecoderConfig:
    shape = {"vocab_size": 512, "hidden_size": 64, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "head_dim": 8}
    return DecoderConfig(**(shape | {"intermediate_size": 192, "dtype": "bfloat16"} | changes))


def hardware(name="a100_80gb") -> Hardware:
    path = Path(__file__).parents[3] / "configs" / "hardware" / f"{name}.yaml"
    return hardware_from(yaml.safe_load(path.read_text()), source=path.name)
