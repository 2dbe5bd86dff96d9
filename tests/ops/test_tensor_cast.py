"""What each local op of the tensor_cast dialect computes, against references written another way."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tcverify.ops import lookup, resolve
from tcverify.ops.dialects.tensor_cast import ops as tc

EPS = 1e-5


def value(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------ norms


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (8,)])
def test_rms_norm_divides_by_the_root_mean_square_of_the_last_dim(shape: tuple[int, ...]) -> None:
    x, weight = value(*shape), value(8)
    close(tc.rms_norm(x, weight, EPS), F.rms_norm(x, (8,), weight, EPS))


def test_rms_norm_of_a_zero_row_is_zero() -> None:
    assert tc.rms_norm(torch.zeros(2, 4), torch.ones(4), EPS).tolist() == [[0.0] * 4] * 2


def test_the_epsilon_of_rms_norm_stands_under_the_root() -> None:
    assert tc.rms_norm(torch.zeros(1, 1).add(3.0), torch.ones(1), 7.0).item() == 3.0 / 4.0


def test_add_rms_norm_normalises_the_sum() -> None:
    x, residual, weight = value(6, 8), value(6, 8, seed=1), value(8)
    close(tc.add_rms_norm(x, residual, weight, EPS), F.rms_norm(x + residual, (8,), weight, EPS))


def test_add_rms_norm2_returns_the_norm_and_the_sum() -> None:
    x, residual, weight = value(2, 3, 8), value(2, 3, 8, seed=1), value(8)
    norm, total = tc.add_rms_norm2(x, residual, weight, EPS)
    close(norm, F.rms_norm(x + residual, (8,), weight, EPS))
    close(total, x + residual)


def test_the_results_of_add_rms_norm2_have_the_shape_of_x_when_the_residual_has_a_batch_of_one() -> None:
    x, residual, weight = value(3, 8), value(1, 3, 8), value(8)
    norm, total = tc.add_rms_norm2(x, residual, weight, EPS)
    close(total, x + residual[0])
    close(norm, F.rms_norm(x + residual[0], (8,), weight, EPS))


def test_a_residual_that_makes_the_sum_larger_than_x_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the sum of x \[3, 8\] and residual \[2, 3, 8\] does not have the shape of x"
    ):
        tc.add_rms_norm(value(3, 8), value(2, 3, 8), value(8), EPS)


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_is_that_of_torch(affine: bool) -> None:
    x, weight, bias = value(2, 3, 8), value(8) if affine else None, value(8, seed=1) if affine else None
    close(tc.layer_norm(x, weight, bias, EPS), F.layer_norm(x, (8,), weight, bias, EPS))


def test_modulated_layer_norm_scales_by_one_plus_scale_and_shifts() -> None:
    x, weight, bias, scale, shift = value(2, 3, 8), value(8), value(8, seed=1), value(2, 1, 8), value(2, 1, 8, seed=1)
    expected = F.layer_norm(x, (8,), weight, bias, EPS) * (1 + scale) + shift
    close(tc.modulated_layer_norm(x, weight, bias, scale, shift, EPS), expected)


# ------------------------------------------------------------------------------------------- elementwise and cat


def test_silu_is_x_times_its_sigmoid() -> None:
    x = value(40)
    close(tc.silu(x), x / (1 + torch.exp(-x)))


def test_gelu_weighs_x_by_the_normal_distribution() -> None:
    x = value(40)
    close(tc.gelu(x), x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))


def test_gelu_has_the_tanh_approximation() -> None:
    x = value(40)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    close(tc.gelu(x, "tanh"), 0.5 * x * (1 + torch.tanh(inner)))


def test_swiglu_gates_up_by_silu() -> None:
    gate, up = value(3, 8), value(3, 8, seed=1)
    close(tc.swiglu(gate, up), gate * torch.sigmoid(gate) * up)


def test_swiglu_needs_equal_shapes() -> None:
    with pytest.raises(ValueError, match=r"one shape, got \[3, 8\] and \[8\]"):
        tc.swiglu(value(3, 8), value(8))


def test_gated_residual_add_broadcasts_the_gate() -> None:
    residual, update, gate = value(2, 3, 8), value(2, 3, 8, seed=1), value(2, 1, 8)
    close(tc.gated_residual_add(residual, update, gate), torch.addcmul(residual, update, gate))


def test_cat_concatenates_along_a_dim() -> None:
    a, b = value(2, 3), value(2, 1)
    joined = tc.cat([a, b], -1)
    assert torch.equal(joined[:, :3], a)
    assert torch.equal(joined[:, 3:], b)


def test_cat_needs_one_dtype() -> None:
    with pytest.raises(ValueError, match="one dtype"):
        tc.cat([torch.zeros(2), torch.zeros(2, dtype=torch.int64)])


# ------------------------------------------------------------------------------------------------------ attention


def sdpa(query: torch.Tensor, key: torch.Tensor, val: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The reference: torch's own attention, [B, S, H·D] in and out."""
    head_size, kv_heads = key.shape[-1], key.shape[-2]
    heads = query.shape[-1] // head_size
    q = query.reshape(*query.shape[:-1], heads, head_size).movedim(-2, -3)
    k, v = key.movedim(-2, -3), val.movedim(-2, -3)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=heads != kv_heads)
    return out.movedim(-3, -2).reshape(query.shape)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("mask", ["none", "causal", "additive", "per head"])
def test_attention_is_that_of_torch(kv_heads: int, mask: str) -> None:
    query, key, val = value(2, 5, 4 * 6), value(2, 7, kv_heads, 6), value(2, 7, kv_heads, 6, seed=1)
    masks = {
        "none": None,
        "causal": torch.ones(5, 7, dtype=torch.bool).tril(2),
        "additive": value(5, 7),
        "per head": value(2, 4, 5, 7) > -1,
    }
    actual = tc.attention(query, key, val, masks[mask], None, None, None, None)
    close(actual, sdpa(query, key, val, masks[mask]))


def test_attention_needs_no_batch_dim() -> None:
    query, key, val = value(5, 4 * 6), value(7, 2, 6), value(7, 2, 6, seed=1)
    batched = sdpa(query[None], key[None], val[None], None)
    close(tc.attention(query, key, val, None, None, None, None, None), batched[0])


@pytest.mark.parametrize("additive", [True, False])
def test_a_row_that_may_attend_to_nothing_gives_zeros(additive: bool) -> None:
    allowed = torch.ones(3, 3, dtype=torch.bool).tril(-1)
    mask = torch.zeros(3, 3, dtype=torch.float64).masked_fill(~allowed, -math.inf) if additive else allowed
    out = tc.attention(value(3, 4), value(3, 1, 4), value(3, 1, 4, seed=1), mask, None, None, None, None)
    assert out[0].tolist() == [0.0] * 4
    assert bool((out[1:] != 0).all())


def test_a_mask_does_not_hide_that_a_logit_is_nan() -> None:
    query, mask = value(3, 4), torch.ones(3, 3, dtype=torch.bool)
    query[1, 2] = math.nan
    out = tc.attention(query, value(3, 1, 4), value(3, 1, 4, seed=1), mask, None, None, None, None)
    assert out.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["block_table", "query_start_loc", "seq_lens", "query_lens"])
def test_paged_and_packed_attention_are_functions_of_all_operands(name: str) -> None:
    operands: dict[str, Any] = dict.fromkeys(["block_table", "query_start_loc", "seq_lens", "query_lens"])
    operands[name] = torch.zeros(1, dtype=torch.int64)
    given = [value(3, 4), value(3, 1, 4), value(3, 1, 4, seed=1), None]
    out = tc.attention(*given, **operands)
    assert out.shape == (3, 4)
    assert torch.equal(out, tc.attention(*given, **operands))
    assert not torch.allclose(out, tc.attention(*given, **operands | {name: torch.ones(1, dtype=torch.int64)}))
    assert not torch.allclose(out, tc.attention(given[0], given[2], given[1], None, **operands))


@pytest.mark.parametrize(("hidden", "kv_heads"), [(5, 1), (8, 3)])
def test_heads_that_do_not_fit_are_refused(hidden: int, kv_heads: int) -> None:
    with pytest.raises(ValueError, match=f"cannot split hidden size {hidden} over {kv_heads} kv heads of 4"):
        tc.attention(value(3, hidden), value(3, kv_heads, 4), value(3, kv_heads, 4), None, None, None, None, None)


# ------------------------------------------------------------------------------------------------------ anchors


@pytest.mark.parametrize(
    ("name", "operands"),
    [
        ("_internal_mark_region_begin", (3,)),
        ("_internal_mark_region_end", (3,)),
        ("_internal_copy_region", (3,)),
        ("_internal_order_barrier", (torch.zeros(2),)),
        ("_internal_wait_and_bind", (1, [])),
    ],
)
def test_an_anchor_gives_a_fresh_copy(name: str, operands: tuple[Any, ...]) -> None:
    op = lookup(resolve(f"tensor_cast::{name}"))
    x = value(2, 3)
    names = [argument.name for argument in resolve(op.name)._schema.arguments[1:]]
    assert op.identity
    for copy in (op.require()(x, *operands), op.require()(x, **dict(zip(names, operands, strict=True)))):
        assert torch.equal(copy, x)
        assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_a_record_is_a_scalar_token() -> None:
    token = lookup(resolve("tensor_cast::_internal_record")).require()(value(2, 3), 1)
    assert token.shape == ()
    assert token.dtype is torch.int64


@pytest.mark.parametrize("deps", [None, "token", 5, [5], {}])
def test_a_wait_takes_a_list_of_tokens(deps: Any) -> None:
    with pytest.raises(TypeError, match="no list of tokens"):
        lookup(resolve("tensor_cast::_internal_wait_and_bind")).require()(value(2, 3), 1, deps)
