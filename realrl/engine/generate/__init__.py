"""Text generation with a KV cache and continuous batching."""

from realrl.engine.generate.generator import generate
from realrl.engine.generate.request import GenerateRequest

__all__ = ["GenerateRequest", "generate"]
