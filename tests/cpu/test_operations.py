from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional as F

from realrl.cpu import NewTokens, loader, operations, rotate
from realrl.model.layers.rope import rope_table

pytestmark = pytest.mark.skipif(loader.why_not() is not None, reason=f"no kernels: {loader.why_not()}")

DTYPES = [torch.float32, torch.bfloat16]


def variants() -> list[tuple[str, ...]]:
    """Return the instructions that this CPU has, and fewer of them."""
    if loader.why_not() is not None:
        return []
    everything = loader._features()
    ends = range(len(loader._AVX512), len(everything) + 1)
    return [loader._AVX2, *(everything[:n] for n in ends if everything[n - 1] != "amx_tile")]


def name_of(features: tuple[str, ...]) -> str:
    return features[0] if features in (loader._AVX2, loader._AVX512) else features[-1]


@pytest.fixture(autouse=True, scope="module", params=variants(), ids=name_of)
def instructions(request):
    """Every test with each of the instruction sets that this CPU has."""
    with pytest.MonkeyPatch.context() as patch:
        use(loader._open(loader.build(loader.cache_folder(), request.param)), patch)
        yield


def use(library, patch):
    patch.setattr(operations, "_kernel", lambda name, dtype: getattr(library, f"{name}_{operations._NAMES[dtype]}"))


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, params=[pytest.param(1, marks=pytest.mark.slow), 2])
def n_threads(request):
    with threads(request.param):
        yield request.param


def assert_close(actual, exact, dtype, factor=1.0):
    """Rounded to the dtype once, but for what a sum in float32 loses."""
    scale = exact.abs().max().item()
    error = (actual.double() - exact).abs().max().item()
    assert error <= factor * scale * (2**-20 if dtype == torch.float32 else 2**-8), (error, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n_rows", "n_inputs", "n_outputs"),
    [
        (1, 32, 32),
        (1, 576, 960),
        (7, 100, 49),
        (16, 31, 1),
        (17, 33, 33),
        (32, 1536, 64),
        (33, 64, 4096),
        (600, 96, 80),
    ],
)
def test_products(dtype, n_rows, n_inputs, n_outputs):
    x, bias, residual = (
        torch.randn(*shape, dtype=dtype) for shape in ((n_rows, n_inputs), (n_outputs,), (n_rows, n_outputs))
    )
    weight, other = (torch.randn(n_outputs, n_inputs, dtype=dtype) * n_inputs**-0.5 for _ in range(2))
    y = x.double() @ weight.double().T
    z = x.double() @ other.double().T
    linear, plain = operations.TiledLinear(weight, bias), operations.TiledLinear(weight, None)
    assert_close(plain(x), y, dtype)
    y += bias
    assert_close(linear(x), y, dtype)
    assert_close(linear(x, residual), y + residual, dtype)
    assert_close(operations.TiledLinear(weight, bias, activation="silu")(x), F.silu(y), dtype)
    activated = operations.TiledLinear(weight, bias, activation="gelu_tanh")
    assert_close(activated(x), F.gelu(y, approximate="tanh"), dtype)
    gated = operations.TiledLinear(other, torch.cat((bias, -bias)), activation="silu", gate=weight)
    assert_close(gated(x), F.silu(y) * (z - bias), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_rows", "n_inputs"), [(1, 576), (9, 33), (32, 100), (300, 64)])
def test_a_norm_within_a_product_is_that_before_it(dtype, n_rows, n_inputs):
    x, weight, other = (torch.randn(n, n_inputs, dtype=dtype) for n in (n_rows, 40, 40))
    norm = operations.RMSNorm(torch.rand(n_inputs), 1e-3)
    normed = operations.rms_norm(x, norm)
    assert torch.equal(operations.TiledLinear(weight, None, norm)(x), operations.TiledLinear(weight, None)(normed))
    fused, plain = (operations.TiledLinear(other, None, n, activation="silu", gate=weight) for n in (norm, None))
    assert torch.equal(fused(x), plain(normed))


def test_float32_products_are_as_exact_as_torchs():
    x, weight = torch.randn(64, 1024), torch.randn(512, 1024)
    exact = x.double() @ weight.double().T

    def error(y):
        return (y - exact).square().mean().sqrt().item()

    assert error(operations.TiledLinear(weight, None)(x)) < 2 * error(F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_company(dtype):
    x, weight = torch.randn(300, 576, dtype=dtype), torch.randn(200, 576, dtype=dtype)
    linear = operations.TiledLinear(weight, None, operations.RMSNorm(torch.rand(576), 1e-5))
    alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(linear(x), alone)
    assert torch.equal(linear(x[5:25]), alone[5:25])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(dtype):
    wide, linear = torch.randn(5, 2, 64, dtype=dtype), operations.TiledLinear(torch.randn(48, 64, dtype=dtype), None)
    for x in (wide[:, 1], wide.permute(1, 0, 2)[0], wide[:, 0].T.contiguous().T):
        assert torch.equal(linear(x), linear(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(dtype, value):
    x = torch.randn(3, 64, dtype=dtype)
    x[1, 7] = value
    for norm in (None, operations.RMSNorm(torch.ones(64), 1e-5)):
        y = operations.TiledLinear(torch.randn(40, 64, dtype=dtype), None, norm)(x)
        assert torch.isfinite(y[[0, 2]]).all()
        assert not torch.isfinite(y[1]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (33, 579), (3, 64), (300, 1024)])
def test_rms_norm(dtype, shape):
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[1])
    exact = F.rms_norm(x.double(), shape[1:], weight.double(), 1e-5)
    assert_close(operations.rms_norm(x, operations.RMSNorm(weight, 1e-5)), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize(
    ("n_rows", "n_heads", "n_kv_heads", "head_dim", "capacity", "window"),
    [
        (32, 9, 3, 64, 96, None),
        (3, 4, 4, 32, 40, None),
        (5, 8, 2, 128, 33, 7),
        (3, 14, 2, 64, 70, None),
        (2, 6, 1, 96, 200, 64),
        (1, 2, 2, 256, 17, 1),
    ],
)
def test_attention(dtype, is_rotated, n_rows, n_heads, n_kv_heads, head_dim, capacity, window):
    qkv = torch.randn(n_rows, n_heads + 2 * n_kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv.split((n_heads, n_kv_heads, n_kv_heads), dim=1)
    keys, values = torch.randn(2, n_rows + 1, n_kv_heads, capacity, head_dim, dtype=dtype)
    lengths = torch.randint(0, capacity, (n_rows,))
    lengths[0] = capacity - 1
    rope = rope_table(torch.rand(head_dim // 2), lengths, dtype) if is_rotated else None
    wide = None if rope is None else (rope[0].double(), rope[1].double())
    wide_q, wide_k = (x.double() if wide is None else rotate(x.double(), *wide) for x in (q, k))
    rows = torch.arange(n_rows)
    wanted_keys, wanted_values = keys.clone(), values.clone()
    wanted_keys[rows, :, lengths] = wide_k.to(dtype)
    wanted_values[rows, :, lengths] = v
    tokens = NewTokens(lengths)
    out = operations.attend(qkv.flatten(1), keys, values, tokens, rope=rope, window=window, scale=head_dim**-0.5)
    out = out.unflatten(1, (n_heads, head_dim))
    assert torch.equal(values, wanted_values)
    assert_close(keys, wanted_keys.double(), dtype)
    for row, length in enumerate(lengths.tolist()):
        seen = slice(0 if window is None else max(0, length + 1 - window), length + 1)
        k_seen, v_seen = (
            x[row, :, seen].double().repeat_interleave(n_heads // n_kv_heads, 0) for x in (wanted_keys, wanted_values)
        )
        scores = (k_seen @ wide_q[row, :, :, None]).squeeze(-1) * head_dim**-0.5
        exact = (torch.softmax(scores, dim=-1)[:, None] @ v_seen).squeeze(1)
        assert_close(out[row], exact, dtype, factor=2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_tokens_of_one_row_see_those_before_them(dtype, window, is_rotated):
    n_heads, n_kv_heads, head_dim, lengths, cache_rows = 6, 2, 64, (40, 1, 19), (3, 1, 2)
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.tensor(cache_rows).repeat_interleave(torch.tensor(lengths))
    qkv = torch.randn(sum(lengths), (n_heads + 2 * n_kv_heads) * head_dim, dtype=dtype)
    rope = rope_table(torch.rand(head_dim // 2), positions, dtype) if is_rotated else None
    together, alone = (torch.full((2, 5, n_kv_heads, 41, head_dim), torch.nan, dtype=dtype) for _ in range(2))
    options = {"window": window, "scale": head_dim**-0.5}
    out = operations.attend(qkv, *together, NewTokens(positions, rows), rope=rope, **options)
    for i in positions.argsort(stable=True):  # one at a time
        x, at = qkv[None, i], positions[None, i]
        angles = None if rope is None else (rope[0][None, i], rope[1][None, i])
        expected = operations.attend(x, *alone[:, rows[i], None], NewTokens(at), rope=angles, **options)
        assert torch.equal(out[i], expected[0])
    assert torch.equal(together.isnan(), alone.isnan())
    assert torch.equal(together.nan_to_num(), alone.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("n_rows", [1, 6, 300])
def test_layers_together_are_their_parts(dtype, window, is_gated, n_rows):
    hidden, n_kv_heads, head_dim, n_layers = 72, 2, 32, 3
    scale = head_dim**-0.5

    def weight(n_outputs, n_inputs):
        return torch.randn(n_outputs, n_inputs, dtype=dtype) * n_inputs**-0.5

    def layer(inner_size):
        norms = [operations.RMSNorm(torch.rand(hidden), 1e-5) for _ in range(2)]
        qkv = operations.TiledLinear(weight(256, hidden), torch.randn(256, dtype=dtype), norms[0])
        o, down = (
            operations.TiledLinear(weight(hidden, 128), None),
            operations.TiledLinear(weight(hidden, inner_size), None),
        )
        gate = weight(inner_size, hidden) if is_gated else None
        inner = operations.TiledLinear(weight(inner_size, hidden), None, norms[1], activation="gelu_tanh", gate=gate)
        return qkv, o, inner, down

    layers = [layer(100 + 20 * i) for i in range(n_layers)]
    windows = [window if i % 2 else None for i in range(n_layers)]
    x, positions = torch.randn(n_rows, hidden, dtype=dtype), torch.arange(n_rows) // 2
    rope = rope_table(torch.rand(head_dim // 2), positions, dtype)
    tokens = NewTokens(positions, torch.arange(n_rows) % 2)
    keys, values = torch.randn(2, n_layers, 2, n_kv_heads, n_rows, head_dim, dtype=dtype)
    wanted, wanted_keys, wanted_values = x, keys.clone(), values.clone()
    for i, (qkv, o, inner, down) in enumerate(layers):
        attended = operations.attend(
            qkv(wanted), wanted_keys[i], wanted_values[i], tokens, rope=rope, window=windows[i], scale=scale
        )
        middle = o(attended, wanted)
        wanted = down(inner(middle), middle)
    together = operations.tiled_layers(layers, windows, n_kv_heads=n_kv_heads, head_dim=head_dim)
    before = x.clone()
    assert torch.equal(together(x, keys, values, tokens, rope), wanted)
    assert torch.equal(keys, wanted_keys)
    assert torch.equal(values, wanted_values)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_that_holds_nothing_yet(dtype):
    qkv = torch.randn(2, 8, 32, dtype=dtype)
    keys, values = torch.full((2, 2, 2, 9, 32), torch.nan, dtype=dtype)
    tokens = NewTokens(torch.zeros(2, dtype=torch.int64))
    out = operations.attend(qkv.flatten(1), keys, values, tokens, rope=None, window=None, scale=1.0)
    assert torch.equal(out, qkv[:, 6:].repeat_interleave(2, 1).flatten(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e30])
@pytest.mark.parametrize("head", [0, 2])
@pytest.mark.parametrize("length", [0, 5])
def test_attention_that_is_not_finite_stays_so(dtype, value, head, length):
    """Heads 0 and 1 are queries, 2 is the key."""
    qkv, (keys, values) = torch.randn(2, 4, 32, dtype=dtype), torch.randn(2, 2, 1, 9, 32, dtype=dtype)
    qkv[1, head] = value
    if value == 3e30:
        qkv[1, :3] = value
    tokens = NewTokens(torch.full((2,), length))
    out = operations.attend(qkv.flatten(1), keys, values, tokens, rope=None, window=None, scale=1.0).unflatten(
        1, (2, 32)
    )
    assert torch.isfinite(out[0]).all()
    assert out[1, 0].isnan().all()
    assert out[1, 1].isnan().all() == (head == 2 or value == 3e30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_of_everything(dtype, activation):
    x = torch.zeros(13, 32, dtype=dtype)
    x[:, 0] = torch.tensor(
        [-torch.inf, -3e38, -1e3, -95.0, -60.0, -5.0, 0.0, 1.0, 60.0, 95.0, 3e38, torch.inf, torch.nan]
    )
    weight = torch.zeros(1, 32, dtype=dtype)
    weight[0, 0] = 1.0
    wide = x[:, 0].double()
    exact = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh")
    y = operations.TiledLinear(weight, None, activation=activation)(x)[:, 0]
    torch.testing.assert_close(
        y, exact.to(y.dtype), rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-30, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 17, 256, 300, 50257])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_sampling(dtype, vocab_size, temperature):
    logits, uniforms = (torch.randn(40, vocab_size) * 3).to(dtype), torch.rand(40, dtype=torch.float64)
    is_early = torch.arange(40) % 2 == (0 if vocab_size > 1 else 2)
    stop_ids = sorted({int(logits[0].argmax()), vocab_size - 1}) if vocab_size > 2 else []
    tokens, logprobs, policy_logprobs = operations.sample(
        logits, uniforms, temperature=temperature, is_early=is_early, stop_ids=stop_ids
    )
    policy = torch.log_softmax(logits.double() / (temperature or 1.0), dim=-1)
    probs = policy.exp()
    for token in stop_ids:
        probs[is_early, token] = 0.0
        assert not (tokens[is_early] == token).any()
    at = tokens[:, None]
    torch.testing.assert_close(policy_logprobs.double(), policy.gather(1, at).squeeze(1), rtol=1e-5, atol=1e-5)
    if temperature == 0.0:
        assert torch.equal(tokens, probs.argmax(dim=-1))
        assert not logprobs.any()
        return
    cumulative = probs.cumsum(dim=-1)
    mass = cumulative[:, -1]
    after = cumulative.gather(1, at).squeeze(1) / mass
    before = after - probs.gather(1, at).squeeze(1) / mass
    assert ((uniforms >= before - 1e-6) & (uniforms <= after + 1e-6)).all()
    torch.testing.assert_close(logprobs.double(), (probs.gather(1, at).squeeze(1) / mass).log(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("place", [0, 299])
def test_invalid_logits_give_no_token(place):
    logits = torch.randn(5, 300)
    logits[1, place], logits[2, place], logits[3], logits[4, place] = torch.nan, torch.inf, -torch.inf, -torch.inf
    uniforms, is_early = torch.rand(5, dtype=torch.float64), torch.zeros(5, dtype=torch.bool)
    tokens, _, _ = operations.sample(logits, uniforms, temperature=1.0, is_early=is_early, stop_ids=[])
    assert (tokens >= 0).tolist() == [True, False, False, False, True]
    assert tokens[4] != place


@pytest.mark.parametrize("largest", [10.0, 1e4, 1e30])
@pytest.mark.parametrize("n_equal", [1, 12])
def test_log_probabilities_of_equal_logits(largest, n_equal):
    logits = (torch.rand(200, 1) * largest).expand(-1, n_equal)
    is_early = torch.zeros(200, dtype=torch.bool)
    uniforms = torch.rand(200, dtype=torch.float64)
    _, *logprobs = operations.sample(logits, uniforms, temperature=0.7, is_early=is_early, stop_ids=[])
    for one in logprobs:
        torch.testing.assert_close(one, torch.full((200,), 1 / n_equal).log(), atol=1e-6, rtol=0.0)


def test_torchs_own_kernels_for_the_matrix_unit_still_work_in_between():
    x, weight = torch.randn(32, 512, dtype=torch.bfloat16), torch.randn(256, 512, dtype=torch.bfloat16)
    linear, expected = operations.TiledLinear(weight, None), F.linear(x, weight)
    for _ in range(5):
        ours = linear(x)
        torch.testing.assert_close(F.linear(x, weight), expected, rtol=0, atol=0)
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=1e-1)
