"""Ops that index: gathers, scatters, writes at indices, lookups in tables."""

from __future__ import annotations

import math
from typing import Any

import torch

from tcverify.strategies.draft import DraftValue
from tcverify.strategies.dtensor.writing import SIZES, DTensorWriter, dim_of

INDEXING = (
    "gather", "index_select", "scatter.src", "scatter.value", "scatter_add", "index.Tensor", "index_put", "embedding",
    "index_fill",
    "index_add", "select_scatter", "slice_scatter", "index_copy", "scatter_reduce", "one_hot", "bucketize", "searchsorted",
    "take",
    "index.Two", "embedding_backward",
)  # fmt: skip


def indexing(w: DTensorWriter, x: DraftValue, a: int, b: int, c: int) -> list[DraftValue]:
    """Add a call that reads or writes elements of `x` by index."""
    name, shape, dim = INDEXING[a % len(INDEXING)], list(w.shape(x)), dim_of(w, x, b)
    if not shape or 0 in shape:
        return []
    size, place = shape[dim], dim % len(shape)
    line = w.input([SIZES[c % len(SIZES)]], 0, torch.int64, size)
    if name in ("gather", "scatter.src", "scatter.value", "scatter_add", "scatter_reduce"):
        return _per_element(w, x, name, dim, c)
    if name.startswith("index"):
        return _by_index(w, x, name, dim, line, c)
    if name == "select_scatter":
        return w.call(name, x, w.fitting(x, c, [*shape[:place], *shape[place + 1 :]]), dim, c % size)
    if name == "slice_scatter":
        return w.call(name, x, w.fitting(x, c, [*shape[:place], size - 1, *shape[place + 1 :]]), dim, 1, size)
    return _looked_up(w, x, name, line, c)


def _per_element(w: DTensorWriter, x: DraftValue, name: str, dim: int, c: int) -> list[DraftValue]:
    """Gather or scatter: every element has an index of its own."""
    shape = list(w.shape(x))
    size, place = shape[dim], dim % len(shape)
    form = [*shape[:place], SIZES[c % len(SIZES)] if name == "gather" else size, *shape[place + 1 :]]
    index = w.input(form, 0, torch.int64, size)
    if name.startswith("scatter") and name != "scatter_add":  # which of equal indices wins is undefined: each is unique
        index = (w.call("argsort", w.input(form), dim) or [index])[0]
    more: tuple[Any, ...] = {
        "gather": (),
        "scatter.value": (3.0,),
        "scatter_reduce": (w.input(form, c), "amax"),
    }.get(name, (w.fitting(x, c, form),))
    return w.call("scatter_reduce.two" if name == "scatter_reduce" else name, x, dim, index, *more)


def _by_index(w: DTensorWriter, x: DraftValue, name: str, dim: int, line: DraftValue, c: int) -> list[DraftValue]:
    """Read or write whole slices at the positions in a 1-D integer tensor."""
    shape = list(w.shape(x))
    size, place = shape[dim], dim % len(shape)
    if name == "index_select":
        return w.call(name, x, dim, line)
    if name in ("index_add", "index_copy", "index_fill"):
        order = (w.call("argsort", w.input([size]), 0) or [line])[0]
        if name == "index_fill":
            return w.call("index_fill.int_Scalar", x, dim, line, 4.0)
        return w.call(name, x, dim, order, w.fitting(x, c, shape))
    if name == "index.Tensor":
        return w.call(name, x, [*[None] * place, line])
    if name == "index_put":
        rows = (w.call("argsort", w.input([size]), 0) or [line])[0]
        return w.call(name, x, [*[None] * place, rows], w.fitting(x, c, shape), bool(c % 2))
    if len(shape) < 2:
        return []
    other = w.input([SIZES[c % len(SIZES)]], 0, torch.int64, shape[-1])
    first = w.input([SIZES[c % len(SIZES)]], 0, torch.int64, shape[0])
    return w.call("index.Tensor", x, [first, *[None] * (len(shape) - 2), other])


def _looked_up(w: DTensorWriter, x: DraftValue, name: str, line: DraftValue, c: int) -> list[DraftValue]:
    """Look something up in a table, in sorted edges or in flattened `x`."""
    shape = list(w.shape(x))
    if name == "embedding":
        table = w.input([SIZES[c % len(SIZES)] + 3, 4], c)
        return w.call(name, table, w.input(shape, 0, torch.int64, SIZES[c % len(SIZES)] + 3))
    if name == "embedding_backward":
        index = w.input([shape[0]], 0, torch.int64, 5)
        return w.call("embedding_dense_backward", x, index, 5, -1, False) if len(shape) == 2 else []
    if name == "one_hot":
        return w.call(name, w.input(shape, 0, torch.int64, 4), 4)
    if name == "take":
        return w.call(name, x, w.input([3], 0, torch.int64, math.prod(shape)))
    edges = (w.call("sort", w.input([5], c), 0) or [line])[0]
    return w.call("bucketize.Tensor", x, edges) if name == "bucketize" else w.call("searchsorted.Tensor", edges, x)


__all__ = ["indexing"]
