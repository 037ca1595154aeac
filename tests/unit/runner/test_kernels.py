"""The C++ kernels against torch."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from engine.attention.base import Prefill, Step
from engine.attention.cpu import CpuPagedAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.kernels import build as build_module
from engine.kernels.build import BuildError, build, load_kernels
from engine.kernels.library import Kernels
from engine.kv_cache import KVCache, KVLayout
from engine.model.dequantize import as_stored, dequantize
from engine.model.layers import Norm, TorchOps
from engine.model.quantized import Matrix, Quantized
from engine.model.rope import rotate

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    loaded = load_kernels()
    assert loaded is not None, "the tests need a C++ compiler"
    return loaded


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


def random_step(cache: KVCache, counts: list[int], context_lens: list[int], seed: int = 0) -> Step:
    """A step of `counts` tokens of sequences with these contexts, in blocks shared by none, in random order."""
    size = cache.layout.block_size
    free = list(range(cache.num_blocks))
    random.Random(seed).shuffle(free)
    tables = [[free.pop() for _ in range(-(-context // size))] for context in context_lens]
    width = max(map(len, tables))
    places = [
        (sequence, position)
        for sequence, (count, context) in enumerate(zip(counts, context_lens, strict=True))
        for position in range(context - count, context)
    ]
    prefills, start = [], 0
    for index, (count, context) in enumerate(zip(counts, context_lens, strict=True)):
        if count > 1:
            prefills.append(Prefill(index, start, count, context))
        start += count
    return Step(
        positions=torch.tensor([position for _, position in places]),
        slots=torch.tensor([tables[s][position // size] * size + position % size for s, position in places]),
        block_table=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        num_decodes=counts.count(1),
        prefills=tuple(prefills),
    )


def run_both(
    kernels: Kernels,
    counts: list[int],
    context_lens: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    activations: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, KVCache, KVCache]:
    """Outputs and caches of kernels and torch, after one step on a cache full of random KV."""
    num_blocks = sum(-(-context // block_size) for context in context_lens) + 3
    caches = [KVCache(KVLayout(2, kv_heads, head_dim, block_size, dtype), num_blocks) for _ in range(2)]
    caches[0].arena.copy_(torch.randn(caches[0].arena.shape))
    caches[1].arena.copy_(caches[0].arena)
    step = random_step(caches[0], counts, context_lens)
    tokens = sum(counts)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(activations)
    angles = torch.randn(tokens, head_dim // 2)
    bound = kernels.attention_for(caches[0], activations, heads)
    assert bound is not None
    fast = CpuPagedAttention(bound, num_heads=heads)
    plain = TorchPagedAttention(caches[1], num_heads=heads)
    ours = fast.begin(step, angles.cos(), angles.sin())(1, qkv.clone())
    expected = plain.begin(step, angles.cos(), angles.sin())(1, qkv.clone())
    return ours, expected, caches[0], caches[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("context_lens", [[1], [15, 16, 17], [255, 256, 257, 1], [3000], list(range(1, 33))])
def test_decode_equals_torch(kernels: Kernels, context_lens: list[int], head_dim: int, dtype: torch.dtype) -> None:
    counts = [1] * len(context_lens)
    ours, expected, fast, plain = run_both(kernels, counts, context_lens, head_dim=head_dim, dtype=dtype)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[torch.float32], rtol=1e-4)
    torch.testing.assert_close(fast.arena, plain.arena, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (9, 3), (14, 2), (8, 8)])
def test_decode_handles_every_group_size(kernels: Kernels, heads: int, kv_heads: int) -> None:
    ours, expected, _, _ = run_both(kernels, [1, 1], [300, 40], heads=heads, kv_heads=kv_heads)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[torch.float32], rtol=1e-4)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 100, 300])
def test_decode_and_prefill_handle_every_block_size(kernels: Kernels, block_size: int) -> None:
    ours, expected, fast, plain = run_both(kernels, [1, 1, 70], [301, 7, 203], block_size=block_size)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[torch.float32], rtol=1e-4)
    torch.testing.assert_close(fast.arena, plain.arena)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(
    ("counts", "context_lens"),
    [
        ([2], [2]),
        ([33], [33]),
        ([2], [1000]),
        ([64, 65, 63], [64, 129, 1025]),
        ([700], [700]),
        ([1, 1, 300, 5, 2], [100, 64, 811, 5, 66]),
    ],
)
def test_prefill_equals_torch(
    kernels: Kernels, counts: list[int], context_lens: list[int], head_dim: int, dtype: torch.dtype
) -> None:
    ours, expected, fast, plain = run_both(kernels, counts, context_lens, head_dim=head_dim, dtype=dtype)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[torch.float32], rtol=1e-4)
    torch.testing.assert_close(fast.arena, plain.arena, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (3, 1), (5, 1), (9, 3), (14, 2), (40, 1), (8, 8)])
def test_prefill_handles_every_group_size(kernels: Kernels, heads: int, kv_heads: int) -> None:
    ours, expected, _, _ = run_both(kernels, [150, 7], [150, 90], heads=heads, kv_heads=kv_heads)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[torch.float32], rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_gives_the_same_bits_however_a_prompt_is_cut(kernels: Kernels, dtype: torch.dtype) -> None:
    """And whatever is computed beside it."""
    length, other = 333, 50
    cache = KVCache(KVLayout(1, 2, 64, 16, dtype), 40)
    bound = kernels.attention_for(cache, torch.float32, 6)
    assert bound is not None
    attention = CpuPagedAttention(bound, num_heads=6)
    qkv = torch.randn(length, 10, 64)
    table = torch.randperm(40, dtype=torch.int32)
    mine, others = table[:21], table[21:25]

    def step(start: int, stop: int, *, company: bool) -> Tensor:
        """Rows of the prompt from start to stop."""
        count = stop - start
        places = torch.arange(start, stop)
        slots = mine[places // 16].long() * 16 + places % 16
        rows, blocks, prefills = qkv[start:stop], mine[None], [Prefill(0, 0, count, stop)]
        if company:
            beside = torch.arange(other)
            places, rows = torch.cat((beside, places)), torch.cat((torch.randn(other, 10, 64), rows))
            slots = torch.cat((others[beside // 16].long() * 16 + beside % 16, slots))
            blocks = torch.stack((torch.nn.functional.pad(others, (0, 17)), mine))
            prefills = [Prefill(0, 0, other, other), Prefill(1, other, count, stop)]
        lens = torch.tensor([one.context_len for one in prefills], dtype=torch.int32)
        asked = Step(places, slots, blocks.contiguous(), lens, 0, tuple(prefills))
        angles = torch.zeros(len(places), 32)
        return attention.begin(asked, angles.cos(), angles.sin())(0, rows.clone())[-count:]

    whole = step(0, length, company=False)
    for edges in ([0, length], [0, 2, length], [0, 64, 128, 200, length], [0, 100, 103, 331, length]):
        parts = [step(start, stop, company=True) for start, stop in itertools.pairwise(edges)]
        assert torch.equal(torch.cat(parts), whole)


def test_prompt_whose_first_scores_are_all_minus_infinity_is_what_is_left(kernels: Kernels) -> None:
    length = 200
    cache = KVCache(KVLayout(1, 1, 64, 16, torch.float32), 16)
    step = random_step(cache, [length], [length])
    bound = kernels.attention_for(cache, torch.float32, 1)
    assert bound is not None
    qkv = torch.randn(length, 3, 64)
    qkv[:, 0] = 100.0
    qkv[:70, 1] = -3e38
    attend = CpuPagedAttention(bound, num_heads=1).begin(step, torch.ones(length, 32), torch.zeros(length, 32))
    ours = attend(0, qkv.clone())[100:]
    weights = torch.softmax(
        (qkv[100:, 0] @ qkv[70:, 1].T / 8).masked_fill(
            torch.arange(70, length) > torch.arange(100, length)[:, None], -torch.inf
        ),
        -1,
    )
    torch.testing.assert_close(ours, weights @ qkv[70:, 2], atol=1e-4, rtol=1e-3)


def test_nan_ahead_of_a_prompt_does_not_show_and_nan_in_it_does(kernels: Kernels) -> None:
    cache = KVCache(KVLayout(1, 1, 16, 16, torch.float32), 6)
    cache.arena.fill_(float("nan"))  # of whoever had the blocks before
    step = random_step(cache, [40], [40])
    bound = kernels.attention_for(cache, torch.float32, 1)
    assert bound is not None
    attend = CpuPagedAttention(bound, num_heads=1).begin(step, torch.ones(40, 8), torch.zeros(40, 8))
    qkv = torch.randn(40, 3, 16)
    assert attend(0, qkv.clone()).isfinite().all()
    qkv[5, 1, 3] = float("nan")
    assert attend(0, qkv)[5:].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "activations"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_mixed_step_equals_torch_for_every_pair_of_dtypes(
    kernels: Kernels, dtype: torch.dtype, activations: torch.dtype
) -> None:
    ours, expected, _, _ = run_both(
        kernels, [1, 1, 2, 130, 40], [9, 200, 2, 130, 500], dtype=dtype, activations=activations
    )
    assert ours.dtype == activations
    torch.testing.assert_close(ours, expected, atol=TOLERANCE[activations], rtol=1e-2)


def test_attention_kernels_are_refused_where_they_would_not_fit(kernels: Kernels) -> None:
    odd = KVCache(KVLayout(1, 1, kernels.lanes + 2, 16, torch.float32), 2)
    half = KVCache(KVLayout(1, 1, 64, 16, torch.float16), 2)
    assert kernels.attention_for(odd, torch.float32, 2) is None
    assert kernels.attention_for(half, torch.float32, 2) is None


def test_large_scores_do_not_overflow(kernels: Kernels) -> None:
    cache = KVCache(KVLayout(1, 1, 16, 16, torch.float32), 4)
    cache.arena[:, 0, 0] = 50.0
    cache.arena[:, 0, 1] = torch.randn(4, 1, 16, 16)
    step = random_step(cache, [1], [40])
    bound = kernels.attention_for(cache, torch.float32, 1)
    assert bound is not None
    qkv = torch.full((1, 3, 16), 50.0)
    qkv[0, 2] = 0.25
    ours = CpuPagedAttention(bound, num_heads=1).begin(step, torch.ones(1, 8), torch.zeros(1, 8))(0, qkv)
    order = step.block_table[0].long()
    values = cache.arena[order, 0, 1, 0].reshape(-1, 16)[:40]
    torch.testing.assert_close(ours[0], values.mean(0), atol=1e-5, rtol=1e-4)


def test_nan_in_the_cache_shows_in_the_output(kernels: Kernels) -> None:
    cache = KVCache(KVLayout(1, 1, 16, 16, torch.float32), 4)
    step = random_step(cache, [1], [40])
    cache.arena[int(step.block_table[0, 1]), 0, 0, 0, 4, 2] = float("nan")
    bound = kernels.attention_for(cache, torch.float32, 1)
    assert bound is not None
    attend = CpuPagedAttention(bound, num_heads=1).begin(step, torch.ones(1, 8), torch.zeros(1, 8))
    assert attend(0, torch.ones(1, 3, 16)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 13, 32, 95, 97, 200])
@pytest.mark.parametrize(("features", "columns"), [(64, 64), (1, 1), (300, 33), (576, 100)])
def test_linear_equals_torch(kernels: Kernels, rows: int, features: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, features), torch.randn(columns, features).to(dtype)
    bias, residual, norm = torch.randn(columns), torch.randn(rows, columns), torch.randn(features)
    close = {"atol": 2e-4, "rtol": 1e-4}
    expected = x @ weight.float().T
    torch.testing.assert_close(kernels.pack_linear(weight)(x), expected, **close)
    torch.testing.assert_close(kernels.pack_linear(weight)(x, residual), expected + residual, **close)
    torch.testing.assert_close(kernels.pack_linear(weight, bias)(x, residual), expected + bias + residual, **close)
    normed = torch.nn.functional.rms_norm(x, (features,), norm, 1e-5) @ weight.float().T
    torch.testing.assert_close(kernels.pack_linear(weight, bias, norm, 1e-5)(x), normed + bias, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize(("features", "columns"), [(64, 64), (1, 1), (30, 7), (30, 25), (30, 40)])
def test_gated_linear_equals_torch(
    kernels: Kernels, rows: int, features: int, columns: int, dtype: torch.dtype
) -> None:
    x, weight, norm = torch.randn(rows, features), torch.randn(2 * columns, features).to(dtype), torch.randn(features)
    close = {"atol": 2e-4, "rtol": 1e-4}
    gate, up = (x @ weight.float().T).chunk(2, -1)
    torch.testing.assert_close(kernels.pack_linear(weight, gated=True)(x), torch.nn.functional.silu(gate) * up, **close)
    gate, up = (torch.nn.functional.rms_norm(x, (features,), norm, 1e-5) @ weight.float().T).chunk(2, -1)
    ours = kernels.pack_linear(weight, None, norm, 1e-5, gated=True)(x)
    torch.testing.assert_close(ours, torch.nn.functional.silu(gate) * up, **close)


def quantized_weight(kind: str, rows: int, features: int) -> tuple[Tensor, Quantized]:
    """The same random weight as plain values and as stored."""
    values = np.random.default_rng(rows).normal(size=(rows, features)).astype(np.float32)
    raw = torch.from_numpy(gguf.quants.quantize(values, GGMLQuantizationType[kind]).reshape(-1))
    stored = as_stored(raw, kind, (rows, features))
    assert stored is not None
    return dequantize(raw, kind, (rows, features), torch.float32), stored


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 13, 97, 200])
@pytest.mark.parametrize(("features", "columns"), [(32, 1), (64, 64), (192, 33), (224, 100), (576, 7)])
def test_quantized_linear_equals_that_of_the_same_floats_bit_for_bit(
    kernels: Kernels, rows: int, features: int, columns: int, kind: str
) -> None:
    x, bias, norm = torch.randn(rows, features), torch.randn(columns), torch.randn(features)
    weight, stored = quantized_weight(kind, columns, features)
    expected = kernels.pack_linear(weight, bias, norm, 1e-5)(x)
    assert torch.equal(kernels.pack_linear(stored, bias, norm, 1e-5)(x), expected)
    weight, stored = quantized_weight(kind, 2 * columns, features)
    expected = kernels.pack_linear(weight, gated=True)(x)
    assert torch.equal(kernels.pack_linear(stored, gated=True)(x), expected)


def test_rows_of_a_batch_are_those_of_each_alone(kernels: Kernels) -> None:
    """Else a request's tokens would depend on its company."""
    weight, stored = quantized_weight("Q4_1", 100, 576)
    x = torch.randn(200, 576)
    for linear in (kernels.pack_linear(weight), kernels.pack_linear(stored), kernels.pack_linear(weight.bfloat16())):
        for rows in (2, 7, 8, 97, 200):
            assert torch.equal(linear(x[:rows]), torch.cat([linear(x[row : row + 1]) for row in range(rows)]))


def test_weights_stay_quantized_only_together_and_in_one_format() -> None:
    (a, quantized_a), (b, quantized_b) = quantized_weight("Q4_1", 3, 64), quantized_weight("Q4_0", 2, 64)
    c, quantized_c = quantized_weight("Q8_0", 2, 64)
    joined = Matrix([a, b], [quantized_a, quantized_b]).blocks()
    assert joined is not None
    assert joined.stored.shape == (5, 32)
    assert joined.offsets is not None
    assert torch.equal(joined.offsets[3:], quantized_b.scales * -8)
    for matrix in (Matrix([a, c], [quantized_a, quantized_c]), Matrix([a, b], [quantized_a, None])):
        assert matrix.blocks() is None
        assert torch.equal(matrix.dense(), torch.cat([*matrix.weights]))


def test_linear_of_no_rows_is_empty(kernels: Kernels) -> None:
    assert kernels.pack_linear(torch.randn(20, 30))(torch.empty(0, 30)).shape == (0, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (3, 7), (200, 576), (5, 16)])
def test_norm_and_activation_equal_torch(kernels: Kernels, rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = (3 * torch.randn(rows, size)).to(dtype), torch.randn(size)
    expected = torch.nn.functional.rms_norm(x.float(), (size,), weight, 1e-5).to(dtype)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 1e-2}
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected, **tolerance)
    gate_up = (10 * torch.randn(rows, 2 * size)).to(dtype)
    gate, up = gate_up.float().chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up).to(dtype)
    torch.testing.assert_close(kernels.silu_and_mul(gate_up), expected, **tolerance)


def test_bfloat16_is_rounded_where_the_reference_implementations_round(kernels: Kernels) -> None:
    """Between two operations too: rounding once at the end would differ in a third of the values."""

    def assert_same(ours: Tensor, expected: Tensor) -> None:
        assert (ours == expected).float().mean() > 0.99  # but for sums in another order
        torch.testing.assert_close(ours, expected, atol=0, rtol=2**-7)

    x, weight = 3 * torch.randn(50, 576).bfloat16(), torch.randn(576).bfloat16()
    normed = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert_same(kernels.rms_norm(x, weight.float(), 1e-5), weight * normed)
    assert_same(TorchOps(torch.bfloat16).rms_norm(x, Norm(weight.float(), 1e-5)), weight * normed)
    gate, up = x.chunk(2, -1)
    assert_same(kernels.silu_and_mul(x), torch.nn.functional.silu(gate) * up)

    qkv, angles = torch.randn(20, 3, 64).bfloat16(), torch.randn(20, 32)
    cos, sin = (torch.cat((part, part), -1).bfloat16()[:, None] for part in (angles.cos(), angles.sin()))
    first, second = qkv.chunk(2, -1)
    expected = qkv * cos + torch.cat((-second, first), -1) * sin
    assert torch.equal(rotate(qkv, angles.cos(), angles.sin()), expected)
    cache = KVCache(KVLayout(1, 1, 64, 1, torch.bfloat16), 20)
    bound = kernels.attention_for(cache, torch.bfloat16, 1)
    assert bound is not None
    bound.rope_store(0, qkv, angles.cos(), angles.sin(), torch.arange(20))
    assert torch.equal(qkv[:, 0], expected[:, 0])
    assert torch.equal(cache.arena[:, 0, 0, 0, 0], expected[:, 1])


def test_activation_at_the_extremes_equals_torch(kernels: Kernels) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, -87.5, -1e-30, 0.0, 1e-30, 87.5, 88.5, 200.0, 1e30, float("nan")])
    gate = torch.cat((gate, torch.zeros(4)))  # one vector at least
    expected = torch.nn.functional.silu(gate)
    ours = kernels.silu_and_mul(torch.cat((gate, torch.ones(16)))[None])[0]
    torch.testing.assert_close(ours, expected, atol=1e-35, rtol=1e-5, equal_nan=True)


def test_bfloat16_is_rounded_as_torch_rounds_it(kernels: Kernels) -> None:
    x = torch.tensor([1.0, 1.00390625, 1.01171875, 3.4e38, float("inf"), float("-inf"), float("nan"), -0.0])
    cache = KVCache(KVLayout(1, 1, 8, 1, torch.bfloat16), 1)
    bound = kernels.attention_for(cache, torch.float32, 1)
    if bound is None:
        pytest.skip("vectors of this machine are wider than the head")
    bound.rope_store(0, x.expand(1, 3, 8).contiguous(), torch.ones(1, 4), torch.zeros(1, 4), torch.zeros(1).long())
    torch.testing.assert_close(cache.arena[0, 0, 1, 0, 0], x.bfloat16(), atol=0, rtol=0, equal_nan=True)


def test_kernels_share_the_openmp_runtime_of_torch(kernels: Kernels) -> None:
    maps = Path("/proc/self/maps").read_text().split()
    assert len({entry for entry in maps if "libgomp" in entry or "libiomp" in entry or "/libomp" in entry}) == 1


def test_library_is_compiled_once_and_left_alone_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "SOURCES", ("elementwise.cpp",))
    library = build(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [library.name]
    written = library.stat().st_mtime_ns
    assert build(tmp_path / "new") == library
    assert library.stat().st_mtime_ns == written
    monkeypatch.setattr(build_module, "FLAGS", (*build_module.FLAGS, "-DOTHER"))
    assert build(tmp_path / "new") != library


def test_without_a_compiler_torch_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert load_kernels.__wrapped__() is None
    assert "install g++" in caplog.text


def test_compiler_that_fails_is_reported_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "FLAGS", (*build_module.FLAGS, "--no-such-flag"))
    with pytest.raises(BuildError, match="no-such-flag"):
        build(tmp_path)
    assert list(tmp_path.iterdir()) == []
