import pytest
import torch

from realrl.cpu import CacheShape, KVCache, NewTokens

SHAPE = CacheShape(n_layers=2, max_rows=3, n_kv_heads=2, head_dim=4, max_tokens=100)


def make_cache(*, grows=True):
    return KVCache(SHAPE, dtype=torch.float32, device=torch.device("cpu"), grows=grows)


def filled(cache, slot, n_tokens):
    """Write random tokens into a row of every layer; returns what was written to layer 1."""
    k, v = torch.randn(2, n_tokens, SHAPE.n_kv_heads, SHAPE.head_dim)
    for layer in range(SHAPE.n_layers):
        cache.write(layer, NewTokens(torch.arange(n_tokens), torch.full((n_tokens,), slot)), k, v)
    return k, v


def row(cache, slot, n_tokens):
    keys, values = cache.view(1, SHAPE.max_rows)
    heads = slice(slot * SHAPE.n_kv_heads, (slot + 1) * SHAPE.n_kv_heads)
    return keys[heads, :n_tokens].transpose(0, 1), values[heads, :n_tokens].transpose(0, 1)


def assert_row(cache, slot, expected):
    for actual, wanted in zip(row(cache, slot, len(expected[0])), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


def test_growth_keeps_what_was_written():
    cache = make_cache()
    cache.reserve(5)
    written = filled(cache, 1, 5)
    cache.reserve(60)
    cache.reserve(61)
    assert_row(cache, 1, written)


def test_growth_is_bounded_and_memory_is_what_the_shape_says():
    cache = make_cache()
    assert cache.size_bytes == 0
    cache.reserve(99)
    assert cache.capacity <= SHAPE.max_tokens
    cache.reserve(100)
    assert cache.size_bytes == 2 * 2 * 3 * 2 * 100 * 4 * 4
    with pytest.raises(ValueError, match="101 tokens asked of a KV cache bounded at 100"):
        cache.reserve(101)


def test_for_the_kernel_all_capacity_is_there_from_the_start():
    cache = make_cache(grows=False)
    assert cache.size_bytes == 0
    cache.reserve(1)
    assert cache.capacity == SHAPE.max_tokens
    before = cache.layer(1)[0].data_ptr()
    cache.reserve(100)
    assert cache.layer(1)[0].data_ptr() == before
    with pytest.raises(ValueError, match="101 tokens asked of a KV cache bounded at 100"):
        cache.reserve(101)


@pytest.mark.parametrize("grows", [True, False])
def test_rows_are_copied_saved_and_loaded(grows):
    cache = make_cache(grows=grows)
    cache.reserve(10)
    written = filled(cache, 0, 7)
    saved = cache.save(0, 7)
    cache.copy(0, 2, 7)
    assert_row(cache, 2, written)
    filled(cache, 0, 7)
    cache.load(1, saved)
    assert_row(cache, 1, written)


@pytest.mark.parametrize("grows", [True, False])
def test_layers_do_not_share_memory(grows):
    cache = make_cache(grows=grows)
    cache.reserve(4)
    written = filled(cache, 0, 4)
    cache.write(0, NewTokens(torch.arange(4), torch.zeros(4, dtype=torch.int64)), *torch.randn(2, 4, 2, 4))
    assert_row(cache, 0, written)
