"""The CPU's twin of CUDA graphs: operations on tensors are recorded, and done again on the same tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from realrl.engine.generate.replay import Work


class Tape(TorchDispatchMode):
    """Operations in order, with the tensors that they read and wrote.

    Whatever makes the host wait for a value raises, as it does while a CUDA graph is captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{func} waits for the device")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Do the operations again; results go where they went."""
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Tapes:
    """A recorder of tapes.

    Attributes:
        n_warmed, n_recorded, n_replayed: pieces of work that were warmed up and recorded, and replays.
    """

    def __init__(self) -> None:
        self.n_warmed = self.n_recorded = self.n_replayed = 0

    def warm_up(self, work: Work) -> None:
        """Do the work."""
        self.n_warmed += 1
        with Tape():  # which refuses what waits
            work()

    def record(self, work: Work) -> Work:
        """Do the work on the same tensors without a result that counts: the tape does it anew."""
        self.n_recorded += 1
        tape = Tape()
        with tape:
            work()

        def replay() -> None:
            self.n_replayed += 1
            tape.replay()

        return replay
