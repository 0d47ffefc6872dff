"""Replicas of parameters compared by a hash: data-parallel ranks that took the same steps hold the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from realrl.engine.groups import Communicator
from realrl.errors import CallError
from realrl.model.decoder import Decoder

_PIECE = 1 << 20  # elements that are hashed at a time, with 8 MB of products
_BETWEEN_PIECES = 0x5851F42D4C957F2D  # odd: no bit of an earlier piece is lost
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(decoder: Decoder, dp: Communicator, *, role: str, worker: int) -> None:
    """Refuse to go on with replicas that differ; all ranks of the layout call this together.

    Each parameter is hashed on its device, and the ranks exchange 8 bytes for each. Parameters that the backend divides
    have no elements here, and are equal.

    Args:
        dp: the ranks that hold the same parameters.
        role, worker: name and global rank, for the message.

    Raises:
        CallError: names the first parameter that differs, and the workers that hold it.
    """
    if dp.n_ranks == 1:
        return
    named = dict(decoder.named_shards())
    mine = torch.stack([torch.tensor(worker, device=decoder.device), *hashes([*named.values()])])
    gathered = dp.all_gather(mine).view(dp.n_ranks, -1).tolist()
    differing = drift([*named], [row[1:] for row in gathered], [row[0] for row in gathered])
    if differing:
        raise CallError(
            f"replicas of role {role!r} differ: {differing}",
            remedy="Go on from a checkpoint of an earlier step (resume=FOLDER), and look for the cause: memory errors "
            "of a device, or code of your own that changes parameters on some workers only. "
            "cluster.check_replicas_every_steps=1 finds the step.",
        )


def hashes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return an int64 scalar for each tensor, on its device: equal for equal bits, and almost never for others.

    A changed element always changes it: elements are multiplied by odd numbers and added up, modulo 2^64.
    """
    longest = min(_PIECE, max((tensor.numel() for tensor in tensors), default=0))
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**63), 2**63 - 1, (longest,), generator=generator).bitwise_or_(1)
    found = []
    for tensor in tensors:
        factors = odd = odd.to(tensor.device)
        words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for piece in words.split(_PIECE):
            total = total * _BETWEEN_PIECES + (piece * factors[: len(piece)]).sum()
        found.append(total)
    return found


def drift(names: Sequence[str], values: Sequence[Sequence[int]], workers: Sequence[int]) -> str:
    """Describe the first parameter whose replicas differ; empty if all are equal.

    Args:
        names: parameters, in the order of each worker's values.
        values: hashes of each worker.
        workers: global ranks of the workers. Where equally many hold each value, the first one's counts as usual.
    """
    differing = [i for i, column in enumerate(zip(*values, strict=True)) if len(set(column)) > 1]
    if not differing:
        return ""
    column = [row[differing[0]] for row in values]
    usual = Counter(column).most_common(1)[0][0]
    odd = [str(worker) for worker, value in zip(workers, column, strict=True) if value != usual]
    others = [str(worker) for worker, value in zip(workers, column, strict=True) if value == usual]
    text = f"{_workers(odd)} another {names[differing[0]]!r} than {'worker' if len(others) == 1 else 'workers'} "
    text += ", ".join(others)
    return text + (f"; {len(differing)} of {len(names)} parameters differ" if len(differing) > 1 else "")


def _workers(ranks: Sequence[str]) -> str:
    return f"worker {ranks[0]} holds" if len(ranks) == 1 else f"workers {', '.join(ranks)} hold"
