"""Matrix products, and parts of model layers: norms, convolutions, losses."""

from __future__ import annotations

import torch

from tcverify.strategies.draft import DraftValue
from tcverify.strategies.dtensor.writing import SIZES, DTensorWriter, dim_of, to_floating

PRODUCTS = (
    "mm", "bmm", "addmm", "baddbmm", "matmul", "mv", "dot", "linear", "einsum", "outer", "inner", "kron", "addmv", "addbmm",
    "vdot",
    "linalg_multi_dot", "tensordot", "mm.t",
)  # fmt: skip
#: Not attention: DTensor searches for its placements for a minute (reports/pytorch/dtensor-attention-search-explodes).
NORMS = (
    "native_layer_norm", "layer_norm", "rms_norm", "native_group_norm", "convolution", "nll_loss",
    "cross_entropy", "avg_pool2d",
    "max_pool2d", "log_softmax_nll", "batch_norm", "cosine_similarity", "conv1d", "upsample", "glu", "normalize",
)  # fmt: skip

#: Of norms: the same number in single precision, to which torch rounds it where it decomposes rms_norm.
_EPS = 2.0**-17


def products(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    """Add a product of `x` and a fitting operand: the requested kind, if `x` has the dims for it."""
    name, x = PRODUCTS[a % len(PRODUCTS)], to_floating(w, x)
    shape, wide = list(w.shape(x)), SIZES[c % len(SIZES)]
    if not shape:
        return []
    by_rank = {1: _of_vectors, 2: _of_matrices, 3: _of_batches}.get(len(shape))
    made = by_rank(w, x, name, b, c) if by_rank is not None else None
    if made is not None:
        return made
    inner = shape[-1]
    if name == "linear":
        return w.call(name, x, w.input([wide, inner], b), w.input([wide], c) if c % 2 else None)
    return w.call("matmul", x, w.input([inner, wide], b)) if a % 2 else w.call("matmul", x, w.input([inner], b))


def _of_vectors(w: DTensorWriter, x: DraftValue, name: str, b: int, c: int) -> list[DraftValue] | None:
    """Add a product of vectors; None if it is not one."""
    if name in ("dot", "vdot", "inner"):
        return w.call(name, x, w.fitting(x, b, w.shape(x)))
    if name == "outer":
        return w.call(name, x, w.input([SIZES[c % len(SIZES)]], b))
    return None


def _of_matrices(w: DTensorWriter, x: DraftValue, name: str, b: int, c: int) -> list[DraftValue] | None:
    """Add a product of matrices, or of a matrix and a vector; None if it is not one."""
    (rows, inner), wide = w.shape(x), SIZES[c % len(SIZES)]
    right = w.fitting(x, b, [inner, wide])
    if name in ("mm", "matmul"):
        return w.call(name, x, right)
    if name == "mm.t":
        turned = w.call("t", x)
        return w.call("mm", turned[0], w.fitting(x, b, [rows, wide])) if turned else []
    if name == "addmm":
        bias = w.input([wide] if c // 16 % 2 else [rows, wide], c)
        return w.call(name, bias, x, right, beta=(1, 0.5)[c // 32 % 2], alpha=(1, 2)[c // 64 % 2])
    if name in ("mv", "addmv"):
        vector = w.fitting(x, b, [inner])
        return w.call("mv", x, vector) if name == "mv" else w.call(name, w.input([rows], c), x, vector)
    if name == "kron":
        return w.call(name, x, w.input([2, 2], b))
    if name == "tensordot":
        return w.call(name, x, w.fitting(x, b), [0], [0])
    if name == "linalg_multi_dot":
        return w.call(name, [x, right, w.input([wide, 3], c)])
    return None


def _of_batches(w: DTensorWriter, x: DraftValue, name: str, b: int, c: int) -> list[DraftValue] | None:
    """Add a product of batches of matrices; None if it is not one."""
    (batch, rows, inner), wide = w.shape(x), SIZES[c % len(SIZES)]
    right = w.fitting(x, b, [batch, inner, wide])
    if name in ("bmm", "matmul"):
        return w.call(name, x, right)
    if name in ("baddbmm", "addbmm"):
        bias = w.input([rows, wide] if name == "addbmm" or c // 16 % 2 else [batch, rows, wide], c)
        return w.call(name, bias, x, right)
    if name == "einsum":
        return w.call(name, ("bij,bjk->bik", "bij,bjk->ik", "bij,bjk->bk")[c // 16 % 3], [x, right])
    return None


def layers(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    """Add a call from a layer of a model, or its loss."""
    name, x = NORMS[a % len(NORMS)], to_floating(w, x)
    shape = list(w.shape(x))
    if not shape:
        return []
    if name in ("native_layer_norm", "layer_norm", "rms_norm"):
        return _norm(w, x, name, b, c)
    if name in ("convolution", "avg_pool2d", "max_pool2d", "native_group_norm", "batch_norm", "upsample"):
        return _on_images(w, x, name, b, c)
    if name in ("nll_loss", "cross_entropy", "log_softmax_nll"):
        return _loss(w, x, name, c)
    if name == "cosine_similarity":
        return w.call(name, x, w.fitting(x, b, shape), dim_of(w, x, c))
    if name == "conv1d":
        signal, kernel = w.input([2, 3, SIZES[b % len(SIZES)] + 2], b), w.input([4, 3, 3], c)
        return w.call("convolution", signal, kernel, None, [1], [c % 2], [1], False, [0], 1)
    if name == "glu":
        return w.call(name, x, dim_of(w, x, c))
    return w.call("linalg_norm", x, None, [dim_of(w, x, c)], True)


def _norm(w: DTensorWriter, x: DraftValue, name: str, b: int, c: int) -> list[DraftValue]:
    shape = list(w.shape(x))
    form = shape[-1:] if b % 3 else shape[-2:]
    weight = w.input(form, b) if b % 2 else None
    bias = w.input(form, c) if c % 2 and weight is not None else None
    if name == "rms_norm":
        return w.call(name, x, form, weight, _EPS)
    return w.call(name, x, form, weight, bias, _EPS)


def _on_images(w: DTensorWriter, x: DraftValue, name: str, b: int, c: int) -> list[DraftValue]:
    """Add a call on a batch of images: `x`, or a new input if `x` is not one."""
    shape = list(w.shape(x))
    if len(shape) != 4:
        shape = [2, 4, SIZES[b % len(SIZES)], 6]
        x = w.input(shape, b)
    if name == "convolution":
        channels, step, pad = SIZES[c % 5], (1, 1, 3, 2)[c // 8 % 4], (0, 1)[c // 16 % 2]
        kernel = w.input([channels, shape[1], 3, 3 if c % 2 else 1], c)
        bias = w.input([channels], b) if c // 4 % 2 else None
        return w.call(name, x, kernel, bias, [1, step], [pad, pad if c % 2 else 0], [1, 1], False, [0, 0], 1)
    if name == "native_group_norm":
        groups = 2 if shape[1] % 2 == 0 else 1
        return w.call(name, x, w.input([shape[1]], c), None, shape[0], shape[1], shape[2] * shape[3], groups, _EPS)
    if name == "batch_norm":
        return w.call("_native_batch_norm_legit.no_stats", x, None, None, True, 0.1, _EPS)
    if name == "upsample":
        return w.call("upsample_nearest2d", x, [shape[2] * 2, shape[3] * 2])
    return w.call("avg_pool2d" if name == "avg_pool2d" else "max_pool2d_with_indices", x, [2, 2], [1 + c % 2, 1])


def _loss(w: DTensorWriter, x: DraftValue, name: str, c: int) -> list[DraftValue]:
    shape = list(w.shape(x))
    if len(shape) != 2 or 0 in shape:
        return []
    classes = shape[1]
    target, weight = w.input(shape[:1], 0, torch.int64, classes), w.input([classes], 0) if c % 2 else None
    if name == "cross_entropy":
        return w.call("cross_entropy_loss", x, target, weight, c // 2 % 3, -100, 0.0)
    if name == "log_softmax_nll":
        x = (w.call("_log_softmax", x, 1, False) or [x])[0]
    return w.call("nll_loss_forward", x, target, weight, c // 2 % 3, 1 if c // 8 % 2 else -100)


__all__ = ["layers", "products"]
