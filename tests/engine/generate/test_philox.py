import numpy as np
import pytest

from realrl.engine.generate.philox import hash_words, philox4x32, row_uniforms, step_key, uniforms

# known-answer vectors published with Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, output
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter, key, expected):
    result = philox4x32(np.array(counter, dtype=np.uint64)[:, None], key)
    assert tuple(int(word) for word in result[:, 0]) == expected


def draw(seed, step, sample_id, response, position):
    words = np.array([hash_words(sample_id)], dtype=np.uint64)
    return uniforms(step_key(seed, step), words, np.array([response]), np.array([position]))[0]


def test_each_part_of_the_counter_and_of_the_key_matters():
    base = (1, 2, "0/3", 4, 5)
    variants = [base, (7, *base[1:]), (1, 7, *base[2:]), (1, 2, "0/7", 4, 5), (1, 2, "0/3", 7, 5), (1, 2, "0/3", 4, 7)]
    assert len({draw(*variant) for variant in variants}) == len(variants)


def test_large_seeds_do_not_collide_with_small_ones():
    assert draw(1, 1, "0/0", 0, 0) != draw(1 + 2**32, 1, "0/0", 0, 0)


def test_rows_do_not_see_each_other():
    words = np.array([hash_words(f"0/{i}") for i in range(6)], dtype=np.uint64)
    responses, positions = np.arange(6), np.arange(6)[::-1].copy()
    together = uniforms(step_key(1, 1), words, responses, positions)
    alone = [uniforms(step_key(1, 1), words[[i]], responses[[i]], positions[[i]])[0] for i in range(6)]
    assert together.tolist() == alone


def test_numbers_are_uniform_in_the_unit_interval():
    n = 20_000
    words = np.broadcast_to(np.array(hash_words("0/0"), dtype=np.uint64), (n, 2))
    numbers = uniforms(step_key(3, 1), words, np.zeros(n, dtype=np.int64), np.arange(n))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    chi_square = float(((counts - n / 50) ** 2 / (n / 50)).sum())
    assert chi_square < 94.6  # 99.99% quantile with 49 degrees of freedom
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_rows_that_start_at_different_times_get_the_numbers_of_their_positions():
    rng, n_rows, n_positions = np.random.default_rng(0), 7, 90
    words = np.array([hash_words(f"0/{i}") for i in range(n_rows)], dtype=np.uint64)
    responses = rng.integers(0, 4, n_rows)
    ahead, positions = row_uniforms(step_key(1, 2), words, responses), np.zeros(n_rows, dtype=np.int64)
    while (left := np.flatnonzero(positions < n_positions)).size:
        rows = rng.permutation(left)[: rng.integers(1, n_rows + 1)]
        expected = uniforms(step_key(1, 2), words[rows], responses[rows], positions[rows])
        assert ahead(rows, positions[rows]).tolist() == expected.tolist()
        positions[rows] += 1
