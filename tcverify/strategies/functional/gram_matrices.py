"""Steps of optimizers that need whole matrices: gathered rows, Gram matrices of them, and back to the rows of this rank.

As in Newton-Schulz iterations over gradients that FSDP has sharded: all_gather → wait [→ trim the padding] → x := f(x, xᵀx) …
→ split → the part of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, RankBinding
from tcverify.strategies.choices import weighted_table
from tcverify.strategies.transformer.roles import roles_of

Step = Callable[[GraphBuilder, fx.Node, int], fx.Node]

_HEADER: dict[str, tuple[Any, ...]] = {
    "dim": tuple(range(256)),
    "rows": weighted_table((2, 4), (1, 2), (3, 2), (4, 1)),
    "columns": weighted_table((3, 4), (2, 2), (4, 2), (5, 1), (1, 1)),
    "trim": weighted_table(("none", 5), ("all", 2), ("padding", 2)),
    "part": weighted_table(("own", 7), ("first", 1), ("last", 1)),
    "second": weighted_table((False, 5), (True, 1)),
    "kept": weighted_table((False, 5), (True, 1)),
    "seed": tuple(range(256)),
}
_STEPS = 5
WIDTH = len(_HEADER) + 2 * _STEPS


def _turned(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call("aten::permute", x, [1, 0])


def _gram(b: GraphBuilder, x: fx.Node) -> fx.Node:
    """xᵀx, scaled so that iterations stay small."""
    return b.call("aten::mul.Tensor", b.call("aten::mm", _turned(b, x), x), 1.0 / (4 * b.shape(x)[0]))


def _iterate(b: GraphBuilder, x: fx.Node, how: int) -> fx.Node:
    """x := x·xᵀx, or with another op on the Gram matrix first."""
    gram = _gram(b, x)
    kind = how % 8
    if kind == 1:  # divided by its own norm
        gram = b.call("aten::div.Tensor", gram, _norm(b, gram))
    elif kind == 2:  # a polynomial
        gram = b.call("aten::add.Tensor", gram, b.call("aten::mm", gram, gram))
    elif kind == 3:  # its own Gram matrix
        gram = b.call("aten::mm", _turned(b, gram), gram)
    elif kind == 4:  # by its sums
        gram = b.call("aten::add.Tensor", gram, b.call("aten::sum.dim_IntList", gram, [0], True))
    elif kind == 5:
        gram = b.call("aten::div.Tensor", gram, b.call("aten::add.Tensor", _total(b, gram), 3.0))
    elif kind == 6:
        gram = b.call("aten::tanh", gram)
    return b.call("aten::mm", x, gram)


def _norm(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call("aten::add.Tensor", b.call("aten::linalg_vector_norm", x, 2), 0.5)


def _total(b: GraphBuilder, x: fx.Node) -> fx.Node:
    return b.call("aten::abs", b.call("aten::sum.default", x))


def _normed(b: GraphBuilder, x: fx.Node, how: int) -> fx.Node:
    """Divided by a norm: of all, of columns, of rows."""
    if how % 3 == 0:
        return b.call("aten::div.Tensor", x, _norm(b, x))
    norms = b.call("aten::linalg_vector_norm", x, 2, [how % 3 - 1], True)
    return b.call("aten::div.Tensor", x, b.call("aten::add.Tensor", norms, 0.5))


def _centred(b: GraphBuilder, x: fx.Node, how: int) -> fx.Node:
    """Less a sum: of columns, of rows, of rows behind a transpose; or a mean."""
    kind = how % 4
    if kind == 2:
        sums = b.call("aten::sum.dim_IntList", _turned(b, x), [1])
        return b.call("aten::sub.Tensor", x, b.call("aten::mul.Tensor", sums, 0.25))
    if kind == 3:
        return b.call("aten::sub.Tensor", x, b.call("aten::mean.dim", x, [0], True))
    sums = b.call("aten::sum.dim_IntList", x, [kind], True)
    return b.call("aten::sub.Tensor", x, b.call("aten::mul.Tensor", sums, 0.25))


def _elementwise(b: GraphBuilder, x: fx.Node, how: int) -> fx.Node:
    """Ops that treat rows alike, and ops that do not."""
    kind = how % 6
    if kind < 3:
        return (
            b.call("aten::mul.Tensor", x, 0.5) if kind == 0 else b.call("aten::tanh" if kind == 1 else "aten::relu", x)
        )
    if kind == 3:
        return b.call("aten::_softmax", x, how // 6 % 2, False)
    if kind == 4:
        return b.call("aten::mul.Tensor", b.call("aten::cumsum", x, how // 6 % 2), 0.25)
    return b.call("aten::flip", x, [how // 6 % 2])


def _other(b: GraphBuilder, x: fx.Node, how: int) -> fx.Node:
    """The Gram matrix of the rows; or only a cast."""
    if how % 2:
        rows = b.call("aten::mul.Tensor", b.call("aten::mm", x, _turned(b, x)), 1.0 / (4 * b.shape(x)[1]))
        return b.call("aten::mm", rows, x)
    return b.call("aten::mul.Tensor", b.call("aten::add.Tensor", x, 0.125), 0.5)


_KINDS: tuple[Step, ...] = weighted_table(
    (_iterate, 7), (_normed, 3), (_centred, 2), (_elementwise, 3), (_other, 1),
)  # fmt: skip


def decode_gram(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes; `b""` gives two plain iterations."""
    choices = choices.ljust(WIDTH, b"\0")
    chosen = {name: table[byte % len(table)] for (name, table), byte in zip(_HEADER.items(), choices, strict=False)}
    names = [dim.name for dim in mesh.dims]
    dim = names[chosen["dim"] % len(names)]
    steps = [
        (_KINDS[choices[at] % len(_KINDS)], choices[at + 1])
        for at in range(len(_HEADER), WIDTH, 2)
        if choices[at] != 255
    ]
    depth = 2 + choices[len(_HEADER)] % 4
    steps = steps[:depth]
    rows, columns = chosen["rows"], chosen["columns"]
    inputs = [InputSpec("shard", (rows, columns), placements=roles_of(mesh).declared([(dim, VARYING)]))]
    if chosen["second"]:
        inputs.append(InputSpec("factor", (columns, columns)))

    def build(b: GraphBuilder, rank: int) -> Any:
        return _built(b, rank, mesh, dim, chosen, steps)

    graphs, ranks = [], []
    by_name = {spec.name: spec for spec in inputs}
    for rank in range(mesh.world_size):
        builder = GraphBuilder(mesh, by_name, rank)
        graphs.append(builder.finish(build(builder, rank)))
        ranks.append(RankBinding(rank, {}))
    return Program(mesh, tuple(graphs), tuple(ranks), tuple(inputs), chosen["seed"], ("gram", chosen["trim"]))


def _built(
    b: GraphBuilder, rank: int, mesh: Mesh, dim: str, chosen: dict[str, Any], steps: list[tuple[Step, int]]
) -> Any:
    group = mesh.dim(dim).group(rank)
    size, position, rows = len(group), group.index(rank), chosen["rows"]
    shard = b.input("shard")
    factor = b.input("factor") if chosen["second"] else None
    gathered = b.call("_c10d_functional::all_gather_into_tensor", shard, size, dim)
    x = whole = b.call("_c10d_functional::wait_tensor", gathered)
    total = size * rows
    if chosen["trim"] == "padding":  # of shards that torch.chunk cuts: the last ones are shorter, or have nothing
        total -= rows if size > 1 else 0
    if chosen["trim"] != "none":
        x = b.call("aten::slice.Tensor", x, 0, 0, total)
    if factor is not None:
        x = b.call("aten::mm", x, b.call("aten::mul.Tensor", factor, 0.5))
    for step, how in steps:
        x = step(b, x, how)
    part = b.call("aten::split.Tensor", x, rows)
    pieces = math.ceil(total / rows)
    wanted = {"own": position, "first": 0, "last": pieces - 1}[chosen["part"]]
    if wanted < pieces:
        own = b.getitem(part, wanted)
        result = b.call("aten::mul.Tensor", own, 0.5)
    else:
        result = b.call("aten::new_zeros", shard, [0, b.shape(x)[1]])
    return (result, b.call("aten::mul.Tensor", whole, 2.0)) if chosen["kept"] else (result,)


__all__ = ["WIDTH", "decode_gram"]
