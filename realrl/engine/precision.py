"""float32 master weights and gradients behind a module that may compute in bf16.

Only what is trained has a master: with adapters these and a scalar head, while the rest of the module is frozen in its
compute dtype. In float32 the module's parameters are the masters, and adapters, which are always float32, are their own
masters in any case. In bf16 the module holds working copies; each gradient moves to its
float32 master as soon as autograd has finished it, so that micro-batches accumulate in float32 and no bf16 gradient of
the whole model ever exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from realrl.model.decoder import Decoder
from realrl.model.lora import trained_parameters
from realrl.plan.adapters import is_adapter


class MasterParameters:
    """The parameters that the optimizer updates.

    Args:
        decoder: those of its parameters that are trained (`realrl.model.lora.trained_parameters`) become the masters,
            under their global names, converted to float32 where needed; then the decoder itself is converted to
            `compute_dtype` in place.
        compute_dtype: of the decoder's forward and backward pass.
    """

    def __init__(self, decoder: Decoder, compute_dtype: torch.dtype) -> None:
        named = trained_parameters(decoder)
        self.names = [name for name, _ in named]
        self.tensors: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # working parameter, its master
        decoder.requires_grad_(False)
        for name, p in named:
            p.requires_grad_(True)
            working_dtype = torch.float32 if is_adapter(name) else compute_dtype
            if working_dtype == torch.float32:
                p.data = p.data.float()
                self.tensors.append(p)
                continue
            master = p.detach().float()
            self.tensors.append(master)
            self._copies.append((p, master))
            p.data = p.data.to(working_dtype)
            p.register_post_accumulate_grad_hook(_MoveGradient(master))
        for p in decoder.parameters():
            if not p.requires_grad:
                p.data = p.data.to(compute_dtype)
        decoder.config = replace(decoder.config, dtype=compute_dtype)
        self._is_in_saved_model = not self._copies and decoder.config.lora is None

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
        if self._copies:
            torch._foreach_copy_([p for p, _ in self._copies], [master for _, master in self._copies])

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The masters by parameter name; empty where the saved model has them: in float32, without adapters."""
        if self._is_in_saved_model:
            return {}
        return {name: t.detach() for name, t in zip(self.names, self.tensors, strict=True)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the masters and publish them.

        Raises:
            KeyError: masters are missing: the state is of another model, or of a run in float32 or without adapters.
            ValueError: the state is of a run with adapters on other layers or of another rank, or this one has none.
        """
        unknown = sorted(state.keys() - set(self.names))
        if unknown:
            raise ValueError(
                f"it holds {len(unknown)} parameters that are not trained here, the first is {unknown[0]!r}"
            )
        if self._is_in_saved_model:
            return
        for name, t in zip(self.names, self.tensors, strict=True):
            if state[name].shape != t.shape:
                raise ValueError(f"its {name!r} is {list(state[name].shape)}, here it is {list(t.shape)}")
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
