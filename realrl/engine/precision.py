"""float32 master weights and gradients behind a module that may compute in bf16.

In float32 the module's parameters are the masters. In bf16 the module holds working copies; each gradient moves to its
float32 master as soon as autograd has finished it, so that micro-batches accumulate in float32 and no bf16 gradient of
the whole model ever exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from realrl.model.decoder import Decoder


class MasterParameters:
    """The parameters that the optimizer updates.

    Args:
        decoder: its parameters become the masters, under their global names, converted to float32 where needed; then
            the decoder itself is converted to `compute_dtype` in place.
        compute_dtype: of the decoder's forward and backward pass.
    """

    def __init__(self, decoder: Decoder, compute_dtype: torch.dtype) -> None:
        named = list(decoder.named_shards())
        self.names = [name for name, _ in named]
        self._working = [p for _, p in named]
        for p in self._working:
            p.requires_grad_(True)
        if compute_dtype == torch.float32:
            decoder.float()
            self.tensors: list[torch.Tensor] = list(self._working)
        else:
            self.tensors = [p.detach().float() for p in self._working]
            for p in self._working:
                p.data = p.data.to(compute_dtype)
            for p, master in zip(self._working, self.tensors, strict=True):
                p.register_post_accumulate_grad_hook(_MoveGradient(master))
        decoder.config = replace(decoder.config, dtype=compute_dtype)
        self._has_copies = compute_dtype != torch.float32

    def gradients(self) -> list[torch.Tensor]:
        """float32 gradients in the order of `names`; zeros for a parameter that none reached."""
        for master in self.tensors:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.tensors if master.grad is not None]

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for master in self.tensors:
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the working parameters."""
        if self._has_copies:
            torch._foreach_copy_(self._working, self.tensors)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The masters by parameter name; empty in float32, where the decoder's own parameters are the masters."""
        if not self._has_copies:
            return {}
        return {name: t.detach() for name, t in zip(self.names, self.tensors, strict=True)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the masters and publish them.

        Raises:
            KeyError: masters are missing: the state is of another model, or of a run in float32.
        """
        if not self._has_copies:
            return
        for name, t in zip(self.names, self.tensors, strict=True):
            t.copy_(state[name])
        self.publish()


class _MoveGradient:
    """Hook: add a working parameter's gradient to its master's, in float32, and drop it."""

    def __init__(self, master: torch.Tensor) -> None:
        self._master = master

    def __call__(self, working: torch.Tensor) -> None:
        grad = working.grad
        if grad is None:
            return
        if self._master.grad is None:
            self._master.grad = grad.float()
        else:
            self._master.grad.add_(grad)
        working.grad = None
