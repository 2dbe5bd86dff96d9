"""Parts of resharding programs besides single sets and reductions: local ops, stages, grids, products and streams."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tcverify.ops import DeviceMesh, Layout
from tcverify.strategies.draft import NoSite
from tcverify.strategies.resharding.choices import ReshardingRecord, grid_of, mesh_of, ordered_mesh
from tcverify.strategies.resharding.flow import ReshardingFlow, ReshardingTensor
from tcverify.strategies.resharding.table_rows import reduce_of_row, rooted_reduction, row_of_newest, set_of_row

_UNARY = ("aten::relu", "aten::neg", "aten::abs")
_BINARY = ("aten::add.Tensor", "aten::sub.Tensor", "aten::maximum", "aten::mul.Tensor")

#: Meshes of two stages, if there are enough ranks.
_STAGES = ((0,), (1,), (0, 1, 2, 3), (0, 2, 3), (1, 0, 2), (1, 0))


def compute(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """An op on one value."""
    x = flow.read(record.a)
    if record.how % 5 == 4 and x.dtype.is_floating_point:
        flow.call("aten::mul.Scalar", x, 0.25, bound=x.bound / 4)
    else:
        flow.call(_UNARY[record.how % len(_UNARY)], x)


def binary(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """An op on two values that lie alike; on one value twice where there are no two."""
    x = flow.read(record.a)
    alike = [v for v in flow.pool if (v.shape, v.layout, v.dtype) == (x.shape, x.layout, x.dtype) and v != x]
    y = alike[-1 - record.b % len(alike)] if alike else x
    if not alike and record.b % 2:
        y = flow.input(x.shape, x.layout, x.dtype)
    op = _BINARY[record.how % len(_BINARY)]
    bound = {"aten::maximum": max(x.bound, y.bound), "aten::mul.Tensor": x.bound * y.bound}.get(op, x.bound + y.bound)
    flow.call(op, x, y, bound=bound)


def matmul(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """A product with a weight that each rank of the mesh has whole."""
    x = flow.read(record.a)
    last = len(x.shape) - 1
    if last < 1 or last in x.layout.sharding:
        raise NoSite
    weight = flow.input((x.shape[-1], 2 + record.how % 3), Layout.replicated(x.mesh), x.dtype)
    flow.call("aten::matmul", x, weight, bound=x.bound * weight.bound * x.shape[-1])


def total(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """A sum over a dim that each rank has whole."""
    x = flow.read(record.a)
    dims = [dim for dim in range(len(x.shape)) if dim not in x.layout.sharding]
    if len(x.shape) < 2 or not dims:
        raise NoSite
    dim = dims[record.how % len(dims)]
    layout = Layout(x.mesh, tuple(s if s is None or s < dim else s - 1 for s in x.layout.sharding))
    flow.call("aten::sum.dim_IntList", x, [dim], layout=layout, bound=x.bound * x.shape[dim])


def view(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """The same memory in another shape: dims in another order, one more, or one fewer."""
    x = flow.read(record.a)
    form = record.how % 4
    if form == 3 and x.shape and 0 not in x.layout.sharding and len(x.shape) > 1:
        lower = tuple(s if s is None else s - 1 for s in x.layout.sharding)
        flow.call("aten::select.int", x, 0, record.b % x.shape[0], layout=Layout(x.mesh, lower))
    elif form == 2 and len(x.shape) < 4:
        higher = tuple(s if s is None else s + 1 for s in x.layout.sharding)
        flow.call("aten::unsqueeze", x, 0, layout=Layout(x.mesh, higher))
    elif len(x.shape) > 1:
        swapped = {0: 1, 1: 0}
        sharding = tuple(s if s is None else swapped.get(s, s) for s in x.layout.sharding)
        flow.call("aten::transpose.int", x, 0, 1, layout=Layout(x.mesh, sharding))
        flow.mark("strided")
    else:
        raise NoSite


def in_place(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """Write into a value that is no input's."""
    own = [v for v in flow.pool if flow.own(v)]
    if not own:
        raise NoSite
    x = own[-1 - record.a % len(own)]
    flow.call(("aten::relu_", "aten::neg_")[record.how % 2], x)
    flow.mark("in-place")


def output(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """Return a value, whether or not it has other readers; sometimes an input."""
    given = [value for value in flow.pool if value.name in flow.given]
    x = given[-1 - record.b % len(given)] if record.how % 3 == 2 else flow.read(record.a)
    flow.outputs.append(x)


def stages(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """Two stages on meshes of their own: sum up, hand over, add."""
    meshes = [DeviceMesh.of(*ranks) for ranks in _STAGES if max(ranks) < flow.world_size]
    first, second = meshes[record.where_low % len(meshes)], meshes[record.where_high % len(meshes)]
    rows = 2 * first.size * second.size
    sharded = record.how % 4 < 2
    layout = Layout.sharded(first, 0) if sharded else Layout.replicated(first)
    x = flow.input((rows, 3), layout)
    if record.how // 4 % 2 and sharded:  # addends of all ranks, summed up on the way
        local = flow.call("aten::sum.dim_IntList", x, [0], True, bound=x.bound * x.spec.shape[0])
        y = flow.reduce(local, 0, Layout.replicated(second), rooted_reduction(record))
    else:
        local = flow.call("aten::sum.dim_IntList", x, [1], bound=3 * x.bound)
        whole = record.how // 8 % 2 or (sharded and first.size != second.size)
        y = flow.set(local, Layout.replicated(second) if whole else Layout.sharded(second, 0))
    flow.mark(row_of_newest(flow))
    flow.mark("stages")
    flow.call("aten::add.Tensor", y, y, bound=2 * y.bound)


def grid(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """A mesh of two dims of which one changes; both where the program may hold what is refused."""
    mesh = grid_of(flow.world_size, record.where)
    rows, columns = mesh.shape
    shape = 2 * rows * columns, rows * columns
    forms: list[tuple[tuple[int | None, int | None], tuple[int | None, int | None]]] = [
        ((0, None), (None, None)), ((None, 0), (None, None)), ((None, None), (0, None)), ((None, None), (None, 0)),
        ((0, 1), (None, 1)), ((None, 1), (0, 1)), ((0, None), (1, None)), ((None, 0), (None, 1)), ((1, 0), (1, None)),
    ]  # fmt: skip
    if flow.setting.odd and record.how % 4 == 3:
        x = flow.input(shape, Layout(mesh, (0, 1)))
        flow.set(x, Layout(mesh, (None, None)))
        flow.mark("odd")
    elif record.how % 3 == 2:  # addends that differ over one mesh dim
        axis = record.how // 3 % 2
        other = 1 if record.how // 6 % 2 else None
        rest = None if other is None else other - 1
        now = 0 if other is None and record.how // 12 % 2 else None
        summed, left = ((0, other), (now, rest)) if axis == 0 else ((other, 0), (rest, now))
        x = flow.input((mesh.shape[axis], *shape), Layout(mesh, summed))
        flow.reduce(x, 0, Layout(mesh, left), record.reduction)
    else:
        source, target = forms[record.how // 3 % len(forms)]
        flow.set(flow.input(shape, Layout(mesh, source)), Layout(mesh, target))
    flow.mark(row_of_newest(flow))


def gather_in_chunks(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """A gather in chunks, and a product whose chunks may be computed on streams of their own."""
    mesh = mesh_of(flow.world_size, record.mesh, record.where)
    if record.a and mesh.size < 3 <= flow.world_size:  # the previous and the next rank differ
        mesh = ordered_mesh(flow.world_size, 3, record.where)
    trips = (2, 1, 3, 4, 8, 5, 6, 7)[record.how % 8]
    rows, inner, columns = 1 + record.b % 3, 2 + record.b // 3 % 3, 2 + record.b // 9 % 3
    dtype = flow.setting.dtype if flow.setting.dtype.is_floating_point else torch.float32
    x = flow.input((trips, mesh.size, rows, inner), Layout.sharded(mesh, 1), dtype)
    linear, bias = record.how // 8 % 2, record.how // 16 % 2
    whole = Layout.replicated(mesh)
    shape = (columns, inner) if linear else (inner, columns)
    weight = flow.input(shape, whole, dtype)
    extra = [flow.input((columns,), whole, dtype)] if linear and bias else []
    if record.how // 32 % 4 == 3:
        x = flow.call("aten::relu", x)
    gathered = flow.set(x, whole)
    op = "aten::linear" if linear else "aten::matmul"
    flow.call(op, gathered, weight, *extra, stream_axis=0, bound=x.bound * weight.bound * inner + 1)
    flow.mark("pipelined")
    if record.how // 128:  # the gathered value has another reader
        flow.call("aten::neg", gathered)


def scatter_products(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """Partial products, whose sum is scattered; the parts may be computed on streams of their own."""
    mesh = mesh_of(flow.world_size, record.mesh, record.where)
    n, inner, columns = mesh.size, 2 + record.b % 3, 2 + record.b // 3 % 3
    rows = n * (1 + record.how % 2)
    dtype = flow.setting.dtype if flow.setting.dtype.is_floating_point else torch.float32
    trips = (0, 2, 3, 1)[record.how // 2 % 4]
    lead = (n, trips) if trips else (n,)
    x = flow.input((*lead, rows, inner), Layout.sharded(mesh, 0), dtype)
    weight = flow.input((n, *(1 for _ in lead[1:]), inner, columns), Layout.sharded(mesh, 0), dtype)
    marked = record.how // 8 % 4  # which of the two carries the stream axis
    first = len(lead) - 1 if marked != 1 else None
    made = flow.call("aten::matmul", x, weight, stream_axis=first or None, bound=x.bound * weight.bound * inner)
    axis = None if marked == 2 else 0
    flow.reduce(made, 0, Layout.sharded(mesh, len(lead) - 1), "sum", stream_axis=axis)
    flow.mark("scattered")


def streams(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """A run of up to three ops whose parts may be computed on streams of their own."""
    mesh = mesh_of(flow.world_size, record.mesh, record.where)
    trips, rows = (2, 3, 1, 4, 8)[record.b % 5], 2
    layout = Layout.sharded(mesh, 1) if record.b // 5 % 2 else Layout.replicated(mesh)
    x = flow.input((trips, rows * mesh.size, 4), layout)
    number = record.how
    for _ in range(1 + record.b // 10 % 3):
        x = _STREAMED[number % len(_STREAMED)](flow, x)
        number //= len(_STREAMED)
        if record.b // 30 % 4 == 3:  # an op between two loops
            x = flow.call("aten::neg", x)
    flow.mark("streams")


def _added(flow: ReshardingFlow, x: ReshardingTensor) -> ReshardingTensor:
    return flow.call("aten::add.Tensor", x, x, stream_axis=0, bound=2 * x.bound)


def _clipped(flow: ReshardingFlow, x: ReshardingTensor) -> ReshardingTensor:
    return flow.call("aten::relu", x, stream_axis=0)


def _gathered(flow: ReshardingFlow, x: ReshardingTensor) -> ReshardingTensor:
    """Whole where it was sharded, and the other way round."""
    whole = x.layout.sharding == (1,)
    return flow.set(x, Layout.replicated(x.mesh) if whole else Layout.sharded(x.mesh, 1), stream_axis=0)


def _summed(flow: ReshardingFlow, x: ReshardingTensor) -> ReshardingTensor:
    last = len(x.shape) - 1
    if last < 2:
        return _added(flow, x)
    return flow.call("aten::sum.dim_IntList", x, [last], stream_axis=0, bound=x.bound * x.shape[last])


def _multiplied(flow: ReshardingFlow, x: ReshardingTensor) -> ReshardingTensor:
    if len(x.shape) < 3:
        return _clipped(flow, x)
    weight = flow.input((x.shape[-1], 4), Layout.replicated(x.mesh), x.dtype)
    return flow.call("aten::matmul", x, weight, stream_axis=0, bound=x.bound * weight.bound * x.shape[-1])


def _columns(flow: ReshardingFlow, x: ReshardingTensor) -> ReshardingTensor:
    """The columns of a product are the parts."""
    if len(x.shape) < 3:
        return _clipped(flow, x)
    # As many as the first dim has, so that the two can be taken for each other.
    weight = flow.input((x.shape[-1], x.shape[0]), Layout.replicated(x.mesh), x.dtype)
    axis = len(x.shape) - 1
    return flow.call("aten::matmul", x, weight, stream_axis=axis, bound=x.bound * weight.bound * x.shape[-1])


def _batched(flow: ReshardingFlow, x: ReshardingTensor) -> ReshardingTensor:
    if len(x.shape) < 3:
        return _added(flow, x)
    weight = flow.input((x.shape[0], x.shape[-1], 4), Layout.replicated(x.mesh), x.dtype)
    return flow.call("aten::bmm", x, weight, stream_axis=0, bound=x.bound * weight.bound * x.shape[-1])


def _reduced(flow: ReshardingFlow, x: ReshardingTensor) -> ReshardingTensor:
    if x.layout.sharding != (1,):
        return _gathered(flow, x)
    parts = flow.call("aten::sum.dim_IntList", x, [1], True, stream_axis=0, bound=x.bound * x.spec.shape[1])
    return flow.reduce(parts, 1, Layout.replicated(x.mesh), "sum", stream_axis=0)


_STREAMED = (_added, _gathered, _summed, _multiplied, _batched, _columns, _reduced, _clipped)

#: What writes a record, by its kind.
MOTIFS: dict[str, Callable[[ReshardingFlow, ReshardingRecord], None]] = {
    "set": set_of_row,
    "reduce": reduce_of_row,
    "compute": compute,
    "binary": binary,
    "matmul": matmul,
    "sum": total,
    "view": view,
    "in-place": in_place,
    "output": output,
    "stages": stages,
    "grid": grid,
    "pipelined": gather_in_chunks,
    "scattered": scatter_products,
    "streams": streams,
}

__all__ = ["MOTIFS"]
