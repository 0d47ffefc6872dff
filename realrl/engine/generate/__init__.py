"""Text generation with a KV cache and continuous batching."""

from realrl.engine.generate.generator import Generator

__all__ = ["Generator"]
