"""The quantised linears of the tensor_cast dialect: what each computes, and the shape of what it returns.

    static_quant_linear(x, w, w_scale, w_offset?, x_scale?, x_offset?, bias?, out_dtype?)
    static_quant_linear_int4(…), of the same arguments
    fp8_linear(x, w, x_scale, w_scale, bias?, out_dtype?)
    mxfp4_linear(…), of the same arguments

All of them are (dequant(x) @ dequant(w) + bias) cast to `out_dtype`, and `…_all_reduce` sums that over a group, with `rank` and
`rank_group` behind the other arguments. x is [M, K], w is [K, N], the result [M, N] and contiguous. Names, order of arguments
and shapes are TensorCast's, which only computes shapes; what it leaves open is fixed here:

- A quantised value q stands for (q − offset) · scale, the inverse of TensorCast's `quantize`. Scales and offsets have one
  element, or one per row of x ([M, 1]) or column of w ([N]). Without `x_scale` x is used as it is.
- int4: w is [K/2, N], bytes of dtype int8 or uint8. A byte holds rows 2i (low half) and 2i + 1 (high half), in two's complement.
- MXFP4 (OCP Microscaling Formats 1.0): elements are E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; blocks of 32 along K
  share a scale that is a power of two (E8M0): `x_scale` is [M, ⌈K/32⌉], `w_scale` [N, ⌈K/32⌉], of dtype float8_e8m0fnu. x is
  [M, K/2] and w [K/2, N], bytes of dtype uint8, packed along K as above. TensorCast says dtype int4, of which torch cannot hold
  values.
- Products are float32, which is what accelerators accumulate in; float64 where the scales are. The cast comes before the sum
  over the group.
- Without `out_dtype` the result of the static ones has the dtype of x, that of the others is float16, as in TensorCast.

Functions are composed of torch primitives so that a number domain can intercept them; one that carries floating-point numbers in
float64 has float64 in place of all their dtypes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any

import torch

from tcverify.errors import UnsupportedOp
from tcverify.ops.dialects.tensor_cast.ops import all_reduce
from tcverify.ops.op import Request

Tensor = torch.Tensor
#: The local ops, by name: each computes its result from the arguments given above.
Meaning = Callable[..., Tensor]

#: Elements of a block that shares a scale, in MXFP4.
BLOCK = 32

_STATIC = (
    "Tensor x, Tensor w, Tensor w_scale, Tensor? w_offset, Tensor? x_scale, Tensor? x_offset, Tensor? bias, "
    "ScalarType? out_dtype"
)
_SCALED = "Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? bias, ScalarType? out_dtype"
_RANKS = "int rank, int[] rank_group"

_ARGUMENTS = {
    "static_quant_linear": _STATIC,
    "static_quant_linear_int4": _STATIC,
    "fp8_linear": _SCALED,
    "mxfp4_linear": _SCALED,
}

LOCAL = tuple(_ARGUMENTS)
FUSED = tuple(f"{name}_all_reduce" for name in LOCAL)

#: Signatures, as TensorCast has them.
SCHEMAS: dict[str, str] = {
    **{name: f"({arguments}) -> Tensor" for name, arguments in _ARGUMENTS.items()},
    **{f"{name}_all_reduce": f"({arguments}, {_RANKS}) -> Tensor" for name, arguments in _ARGUMENTS.items()},
}


# ------------------------------------------------------------------------------------------------------- dequantising


def halves(packed: Tensor, dim: int) -> Tensor:
    """The two halves of each byte, low first, as codes 0…15 of dtype int32: `dim` becomes twice as long."""
    codes = packed.to(torch.int32) & 255
    both = torch.stack((codes & 15, codes >> 4), dim % packed.dim() + 1)
    return both.flatten(dim % packed.dim(), dim % packed.dim() + 1)


def signed_int4(codes: Tensor) -> Tensor:
    """The integers −8…7 for codes 0…15."""
    return codes - ((codes & 8) << 1)


def doubled_e2m1(codes: Tensor) -> Tensor:
    """Twice the numbers for E2M1 codes: integers. Sign, two bits of exponent (bias 1), one bit of fraction."""
    exponent, fraction = (codes >> 1) & 3, codes & 1
    size = torch.where(exponent == 0, fraction, (2 + fraction) << (exponent - 1).clamp(min=0))
    return torch.where(codes >= 8, -size, size)


def _wide(scale: Tensor) -> torch.dtype:
    """What products are computed in."""
    return torch.float64 if scale.dtype is torch.float64 else torch.float32


def _dequantised(q: Tensor, scale: Tensor | None, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
    value = q.to(dtype)
    if offset is not None:
        value = value - offset.to(dtype)
    return value if scale is None else value * scale.to(dtype)


def _blocks(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of E2M1 codes [R, K] with the scales [R, ⌈K/32⌉] of their blocks."""
    spread = scale.to(dtype).repeat_interleave(BLOCK, dim=-1)[..., : codes.shape[-1]]
    return doubled_e2m1(codes).to(dtype) * 0.5 * spread


def _finished(product: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (product if bias is None else product + bias).to(dtype).contiguous()


# ---------------------------------------------------------------------------------------------------------- local ops


def static_quant_linear(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_offset: Tensor | None,
    x_scale: Tensor | None,
    x_offset: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """x [M, K], quantised where `x_scale` is given, by int8 weights [K, N]."""
    dtype = _static_dtype("static_quant_linear", x, w, (w_scale, w_offset), (x_scale, x_offset), bias, out_dtype)
    wide = _wide(w_scale)
    left = _dequantised(x, x_scale, x_offset, wide)
    return _finished(left @ _dequantised(w, w_scale, w_offset, wide), bias, dtype)


def static_quant_linear_int4(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_offset: Tensor | None,
    x_scale: Tensor | None,
    x_offset: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """x [M, K], quantised where `x_scale` is given, by int4 weights, two per byte: [K/2, N]."""
    name = "static_quant_linear_int4"
    dtype = _static_dtype(name, x, w, (w_scale, w_offset), (x_scale, x_offset), bias, out_dtype, packed=2)
    wide = _wide(w_scale)
    left = _dequantised(x, x_scale, x_offset, wide)
    return _finished(left @ _dequantised(signed_int4(halves(w, 0)), w_scale, w_offset, wide), bias, dtype)


def fp8_linear(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """x [M, K] by w [K, N], both of 8-bit floating point."""
    dtype = _fp8_dtype(x, w, x_scale, w_scale, bias, out_dtype)
    wide = _wide(w_scale)
    return _finished(_dequantised(x, x_scale, None, wide) @ _dequantised(w, w_scale, None, wide), bias, dtype)


def mxfp4_linear(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """x [M, K/2] by w [K/2, N], both of packed E2M1 with a scale per 32 elements along K."""
    dtype = _mxfp4_dtype(x, w, x_scale, w_scale, bias, out_dtype)
    wide = _wide(w_scale)
    left, right = _blocks(halves(x, -1), x_scale, wide), _blocks(halves(w, 0).t(), w_scale, wide)
    return _finished(left @ right.t(), bias, dtype)


MEANINGS: dict[str, Meaning] = {
    f.__name__: f for f in (static_quant_linear, static_quant_linear_int4, fp8_linear, mxfp4_linear)
}


def summed(name: str) -> Callable[..., Generator[Request, Tensor, Tensor]]:
    """What `<name>_all_reduce` means: the local op, then the sum over the group. A bias is added on every rank."""
    run = MEANINGS[name]

    names = tuple(inspect.signature(run).parameters)

    def call(me: int, *args: Any, **kwargs: Any) -> Generator[Request, Tensor, Tensor]:
        values = dict(zip((*names, "rank", "rank_group"), args, strict=False)) | kwargs
        group = values.pop("rank"), values.pop("rank_group")
        return (yield from all_reduce(me, run(**values), *group))

    return call


# --------------------------------------------------------------------------------------------- shapes, and what is refused


def shape_of(name: str) -> Callable[..., Tensor]:
    """The fake kernel of an op: an empty tensor of the shape and dtype of the result."""
    base = name.removesuffix("_all_reduce")

    def fake(*args: Any) -> Tensor:
        given = args[:-2] if name in FUSED else args
        x, w = given[:2]
        if base in ("fp8_linear", "mxfp4_linear"):
            dtype = (_fp8_dtype if base == "fp8_linear" else _mxfp4_dtype)(*given)
        else:
            _, _, w_scale, w_offset, x_scale, x_offset, bias, out_dtype = given
            packed = 2 if base.endswith("int4") else 1
            dtype = _static_dtype(base, x, w, (w_scale, w_offset), (x_scale, x_offset), bias, out_dtype, packed)
        empty: Tensor = x.new_empty((x.shape[0], w.shape[1]), dtype=dtype)
        return empty

    return fake


def _static_dtype(
    name: str,
    x: Tensor,
    w: Tensor,
    of_w: tuple[Tensor | None, Tensor | None],
    of_x: tuple[Tensor | None, Tensor | None],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    packed: int = 1,
) -> torch.dtype:
    """Check the operands; return the dtype of the result."""
    _check_product(name, x, w, bias, x.shape[-1], packed * w.shape[0])
    if w.dtype not in (torch.int8, torch.uint8):
        raise ValueError(f"{name} needs weights of dtype int8 or uint8, got {w.dtype}")
    for role, operand in zip(("w_scale", "w_offset"), of_w, strict=True):
        _check_scale(name, role, operand, (w.shape[1],))
    for role, operand in zip(("x_scale", "x_offset"), of_x, strict=True):
        _check_scale(name, role, operand, (x.shape[0], 1))
    if out_dtype is None and not x.is_floating_point():
        raise UnsupportedOp(
            f"tensor_cast::{name}", "a result in the integer dtype of x has no meaning: give an out_dtype"
        )
    return x.dtype if out_dtype is None else out_dtype


def _fp8_dtype(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> torch.dtype:
    _check_product("fp8_linear", x, w, bias, x.shape[-1], w.shape[0])
    if not (x.is_floating_point() and w.is_floating_point()):
        raise ValueError(f"fp8_linear needs x and w of an 8-bit floating dtype, got {x.dtype} and {w.dtype}")
    _check_scale("fp8_linear", "x_scale", x_scale, (x.shape[0], 1))
    _check_scale("fp8_linear", "w_scale", w_scale, (w.shape[1],))
    return _half(w) if out_dtype is None else out_dtype


def _mxfp4_dtype(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> torch.dtype:
    _check_product("mxfp4_linear", x, w, bias, x.shape[-1], w.shape[0])
    if x.dtype is not torch.uint8 or w.dtype is not torch.uint8:
        reason = f"x and w are modelled as bytes (uint8) of two elements each, got {x.dtype} and {w.dtype}"
        raise UnsupportedOp("tensor_cast::mxfp4_linear", reason)
    blocks = -(-2 * x.shape[1] // BLOCK)
    for role, scale, rows in (("x_scale", x_scale, x.shape[0]), ("w_scale", w_scale, w.shape[1])):
        if tuple(scale.shape) != (rows, blocks):
            raise ValueError(f"mxfp4_linear needs {role} of shape {[rows, blocks]}, got {list(scale.shape)}")
    return _half(w_scale) if out_dtype is None else out_dtype


def _half(operand: Tensor) -> torch.dtype:
    """The dtype of a result for which none is given; in a domain that carries all in float64, that."""
    return torch.float64 if operand.dtype is torch.float64 else torch.float16


def _check_product(name: str, x: Tensor, w: Tensor, bias: Tensor | None, inner: int, rows: int) -> None:
    if x.dim() != 2 or w.dim() != 2 or inner != rows:
        raise ValueError(f"{name} cannot multiply x {list(x.shape)} by w {list(w.shape)}")
    if bias is not None and tuple(bias.shape) != (w.shape[1],):
        raise ValueError(f"{name} needs a bias of shape {[w.shape[1]]}, got {list(bias.shape)}")


def _check_scale(name: str, role: str, operand: Tensor | None, shape: tuple[int, ...]) -> None:
    if operand is not None and (operand.numel() != 1 or operand.dim() > 2) and tuple(operand.shape) != shape:
        raise ValueError(f"{name} needs {role} of one element or of shape {list(shape)}, got {list(operand.shape)}")


__all__ = [
    "BLOCK",
    "FUSED",
    "LOCAL",
    "MEANINGS",
    "SCHEMAS",
    "doubled_e2m1",
    "halves",
    "shape_of",
    "signed_int4",
    "summed",
]
