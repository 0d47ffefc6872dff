"""Counter-based uniform numbers: a value depends on its key and counter only, never on what was drawn before.

Philox4x32 with 10 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]  # each element holds one 32-bit word

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_AHEAD = 32  # positions drawn at a time: a draw takes about as long for a thousand numbers as for one


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Encrypt `counter` [4, N] under a 64-bit key given as two words (low, high); returns [4, N]."""
    x0, x1, x2, x3 = counter
    for round_index in range(_ROUNDS):
        k0, k1 = (
            np.uint64((word + round_index * step) & 0xFFFFFFFF) for word, step in zip(key, _KEY_STEPS, strict=True)
        )
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]  # 32 x 32 bits fit into 64
        x0, x1, x2, x3 = (
            (product1 >> _SHIFT) ^ x1 ^ k0,
            product1 & _MASK,
            (product0 >> _SHIFT) ^ x3 ^ k1,
            product0 & _MASK,
        )
    return np.stack((x0, x1, x2, x3))


def hash_words(text: str) -> tuple[int, int]:
    """Two 32-bit words that stand for `text` (BLAKE2b), equal in every process."""
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return digest & 0xFFFFFFFF, digest >> 32


def step_key(seed: int, step: int) -> tuple[int, int]:
    """The key of all numbers of one step of one run."""
    return hash_words(f"{seed}/{step}")


def uniforms(
    key: tuple[int, int],
    sample_words: npt.NDArray[np.uint64],
    response_indices: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """Draw a number in [0, 1) with 53 random bits for each (sample, response, position).

    Args:
        key: key from `step_key`.
        sample_words: [N, 2], `hash_words` of each sample id.
        response_indices: [N], index among the sample's responses.
        positions: [N], position of the token in its response, from 0.
    """
    counter = np.stack(
        (positions.astype(np.uint64), response_indices.astype(np.uint64), sample_words[:, 0], sample_words[:, 1])
    )
    high, low = philox4x32(counter, key)[:2]
    bits = ((high << _SHIFT) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def row_uniforms(
    key: tuple[int, int], sample_words: npt.NDArray[np.uint64], response_indices: npt.NDArray[np.int64]
) -> Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.float64]]:
    """Return `uniforms` for rows that each ask for position 0, 1, 2, ... in turn: drawn ahead, many at a time.

    Args:
        key: key from `step_key`.
        sample_words: uint64 [N, 2], `hash_words` of each row's sample id.
        response_indices: int64 [N].

    Returns:
        A function of rows [M] and their positions [M], which gives their numbers [M].
    """
    drawn = np.empty((len(sample_words), _AHEAD))

    def take(rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        offsets = positions % _AHEAD
        due = offsets == 0
        if due.any():
            wanted = rows[due].repeat(_AHEAD)
            ahead = (positions[due, None] + np.arange(_AHEAD)).ravel()
            numbers = uniforms(key, sample_words[wanted], response_indices[wanted], ahead)
            drawn[rows[due]] = numbers.reshape(-1, _AHEAD)
        return drawn[rows, offsets]

    return take
