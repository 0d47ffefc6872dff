"""Translation between our parameters and a checkpoint's tensors, which may join several or hold slices of one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from realrl.model.decoder import Decoder
from realrl.model.families.format import Family, Part, StoredTensor
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.specs import DTYPE_BYTES, Layer
from realrl.shape import DecoderConfig


class Assembly:
    """The checkpoint of one model.

    Args:
        family: the checkpoint's layout.
        config: the model.
        without: parameters that the checkpoint does not hold.

    Attributes:
        tensors: the tensors to write, in the order in which parameters, coming in the model's order, complete them.
    """

    def __init__(self, family: Family, config: DecoderConfig, *, without: Collection[str] = ()) -> None:
        self._family = family
        self._element_bytes = DTYPE_BYTES[config.dtype]
        self._specs = {spec.name: spec for spec in parameter_specs(config) if spec.name not in without}
        self._place = {name: place for place, name in enumerate(self._specs)}
        forms = [
            [tensor for tensor in form(config) if all(part.name in self._specs for part in tensor.parts)]
            for form in (family.stored_tensors, *family.other_forms)
        ]
        self._known = {tensor.name: tensor for form in forms for tensor in form}
        self.tensors: Sequence[StoredTensor] = sorted(forms[0], key=self._last_place)

    def _last_place(self, tensor: StoredTensor) -> int:
        return max(self._place[part.name] for part in tensor.parts)

    def shape_of(self, tensor: StoredTensor) -> tuple[int, ...]:
        """The shape in the file."""
        shapes = [self._shape(part) for part in tensor.parts]
        shape = list(shapes[0])
        shape[tensor.dim] = sum(shape[tensor.dim] for shape in shapes)
        if tensor.is_transposed:
            shape[-2:] = shape[:-3:-1]
        return tuple(shape)

    def num_bytes_of(self, tensor: StoredTensor) -> int:
        """The size in the file."""
        return math.prod(self.shape_of(tensor)) * self._element_bytes

    def layer_of(self, tensor: StoredTensor) -> Layer:
        """The block, embedding or head whose parameters the tensor holds."""
        return self._specs[tensor.parts[0].name].layer

    def _shape(self, part: Part) -> tuple[int, ...]:
        shape = self._specs[part.name].shape
        return shape if part.index is None else shape[1:]

    # ------------------------------------------------------------ reading

    def find(self, name: str) -> StoredTensor | None:
        """Find a file's tensor by name, in any form; None if the model has none of that name."""
        return self._known.get(self._family.canonical_name(name))

    def lacking(self, found: Collection[StoredTensor]) -> list[str]:
        """Names of the tensors in `tensors` whose parameters the found ones do not cover."""
        whole = {part.name for tensor in found for part in tensor.parts if part.index is None}
        slices = {part for tensor in found for part in tensor.parts if part.index is not None}

        def is_there(part: Part) -> bool:
            if part.name in whole:
                return True
            if part.index is not None:
                return part in slices
            return all(Part(part.name, i) in slices for i in range(self._specs[part.name].shape[0]))

        return [tensor.name for tensor in self.tensors if not all(map(is_there, tensor.parts))]

    def copy(
        self, stored: StoredTensor, tensor: torch.Tensor, decoder: Decoder, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy a tensor of the right shape into a decoder, or the part that the decoder holds.

        Args:
            tensor: tensor of a file; only the copied part is read.
            parameters: the decoder's parameters, by global name.
        """
        whole = tensor.transpose(-1, -2) if stored.is_transposed else tensor
        start = 0
        for i, part in enumerate(stored.parts):
            size = self._shape(part)[stored.dim]
            if stored.is_interleaved:
                piece = whole.unflatten(stored.dim, (size, -1)).select(stored.dim + 1, i)
            else:
                piece = whole.narrow(stored.dim, start, size)
            start += size
            if part.name in parameters:
                _copy_part(piece, part, parameters[part.name].detach(), decoder.place_of(part.name))

    # ------------------------------------------------------------ writing

    def assemble(
        self, tensors: Sequence[StoredTensor], parameters: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[torch.Tensor]:
        """Yield stored tensors in order, holding a parameter only until its last tensor is out.

        Ends early if the parameters do.

        Args:
            tensors: some of `self.tensors`, in order.
            parameters: (name, whole parameter) of exactly their parts, in the order of the model.

        Raises:
            ValueError: a parameter comes out of order.
        """
        uses = Counter(part.name for tensor in tensors for part in tensor.parts)
        expected = iter(sorted(uses, key=self._place.__getitem__))
        held: dict[str, torch.Tensor] = {}
        for tensor in tensors:
            while any(part.name not in held for part in tensor.parts):
                name, parameter = next(parameters, ("", None))
                if parameter is None:
                    return
                wanted = next(expected, "none")
                if name != wanted:
                    raise ValueError(f"parameter {name!r} came to be saved where {wanted!r} is next")
                held[name] = parameter
            yield _join(tensor, held)
            for part in tensor.parts:
                uses[part.name] -= 1
                if not uses[part.name]:
                    del held[part.name]


def _copy_part(piece: torch.Tensor, part: Part, target: torch.Tensor, place: tuple[slice, ...]) -> None:
    if part.index is not None:
        first, *place_in_slice = place
        if not first.start <= part.index < first.stop:
            return
        target, place = target[part.index - first.start], tuple(place_in_slice)
    target.copy_(piece[place])


def _join(tensor: StoredTensor, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
    pieces = [held[part.name] if part.index is None else held[part.name][part.index] for part in tensor.parts]
    if tensor.is_interleaved:
        joined = torch.stack(pieces, dim=tensor.dim + 1).flatten(tensor.dim, tensor.dim + 1)
    else:
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=tensor.dim)
    return joined.transpose(-1, -2) if tensor.is_transposed else joined
