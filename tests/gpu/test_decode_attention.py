"""FlashAttention to a token-major cache against sums of all scores, in half precision."""

from __future__ import annotations

import pytest
import torch

from realrl.cpu import CacheShape, KVCache, NewTokens, plain_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(8, 8, 64), (8, 2, 128), (6, 1, 256), (4, 4, 72)])
def test_flash_attention_decodes_as_scores_do(n_heads: int, n_kv_heads: int, head_dim: int, window: int | None) -> None:
    torch.manual_seed(0)
    n_rows, n_tokens = 9, 200
    shape = CacheShape(1, n_rows + 2, n_kv_heads, head_dim, n_tokens)
    positions = torch.tensor([0, 1, 4, 5, 63, 64, 65, 130, 199], device=CUDA)
    qkv = torch.randn(n_rows, (n_heads + 2 * n_kv_heads) * head_dim, device=CUDA).bfloat16()
    filled = torch.randn(2, n_rows + 2, n_kv_heads, n_tokens, head_dim, device=CUDA).bfloat16()
    results = []
    for token_major in (False, True):
        cache = KVCache(shape, dtype=torch.bfloat16, device=CUDA, grows=not token_major, token_major=token_major)
        cache.reserve(n_tokens)
        for tensor, values in zip(cache.layer(0), filled, strict=True):
            tensor[:] = values
            if token_major:  # what no row has written may be anything
                for row, position in enumerate(positions.tolist()):
                    tensor[row, :, position + 1 :] = torch.nan
        attention = plain_attention(cache, NewTokens(positions))
        results.append(attention.attend(0, qkv, rope=None, window=window))
    torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)
