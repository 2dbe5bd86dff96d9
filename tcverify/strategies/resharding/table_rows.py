"""Sets and reductions, by the communication that they take: the value to begin with, and the layout that it is brought into."""

from __future__ import annotations

from collections.abc import Callable

from tcverify.ops import DeviceMesh, Layout, Resharding
from tcverify.ops.reductions import ReduceOp
from tcverify.strategies.draft import NoSite
from tcverify.strategies.resharding.choices import ReshardingRecord, fitting_mesh, mesh_of, ordered_mesh
from tcverify.strategies.resharding.decision_table import row_of
from tcverify.strategies.resharding.flow import ReshardingFlow, ReshardingTensor


def set_of_row(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """Bring a value into a layout, so that it takes the communication of the record's row."""
    first = flow.setting.odd and all(label != "odd" for _, label in flow.marks)
    ROWS["odd" if first else record.row](flow, record)
    flow.mark(row_of_newest(flow))


def reduce_of_row(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """Reduce a value whose parts differ from rank to rank."""
    SUMS[record.sum](flow, record)
    flow.mark(row_of_newest(flow))


def row_of_newest(flow: ReshardingFlow) -> str:
    """`row_of` the newest step, which is a set or a reduction."""
    step = flow.steps[-1]
    operand = next(value for value in flow.pool if value.name == step.reads[0])
    dim, reduction = step.args[1:] if len(step.args) > 1 else (None, None)
    return row_of(Resharding(operand.layout, step.layout, operand.shape, dim, reduction))


# ---------------------------------------------------------------------------------------------------------------- sets


def _sharded(flow: ReshardingFlow, record: ReshardingRecord) -> ReshardingTensor:
    """A value that is divided over the only dim of its mesh, the outermost in memory; a new input where there is none."""
    found = [v for v in flow.pool if v.layout.is_sharded and v.mesh.ndim == 1 and v.outer]
    if found and record.how % 4 != 3:
        return found[-1 - record.a % len(found)]
    shape = flow.setting.shape
    mesh = _some(fitting_mesh(_several(flow, record.mesh, record.where), shape[0]))
    if record.how % 16 == 15 and len(shape) > 1:
        x = flow.input((shape[1], shape[0], *shape[2:]), Layout.sharded(mesh, 1))
        return _transposed(flow, x, Layout.sharded(mesh, 0))
    return flow.input(shape, Layout.sharded(mesh, 0))


def _whole(flow: ReshardingFlow, record: ReshardingRecord, single: bool = False) -> ReshardingTensor:
    """A value that each rank of its 1-D mesh holds whole; a new input where there is none."""
    found = [v for v in flow.pool if not v.layout.is_sharded and v.mesh.ndim == 1 and (not single or v.mesh.size == 1)]
    if found and record.how % 4 != 3:
        return found[-1 - record.a % len(found)]
    mesh = mesh_of(flow.world_size, "single" if single else record.mesh, record.where)
    x = flow.input(flow.setting.shape, Layout.replicated(mesh))
    return _transposed(flow, x, x.layout) if record.how % 16 == 15 and len(x.shape) > 1 else x


def _transposed(flow: ReshardingFlow, x: ReshardingTensor, layout: Layout) -> ReshardingTensor:
    """The value with its first two dims swapped: not contiguous."""
    y = flow.call("aten::transpose.int", x, 0, 1, layout=layout)
    flow.mark("strided")
    return y


def _several(flow: ReshardingFlow, sort: str, number: int) -> DeviceMesh:
    """A mesh of at least two ranks."""
    mesh = mesh_of(flow.world_size, sort, number)
    return mesh if mesh.size > 1 else ordered_mesh(flow.world_size, 2, number)


def _some(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        raise NoSite
    return mesh


def _other(flow: ReshardingFlow, record: ReshardingRecord, mesh: DeviceMesh) -> DeviceMesh:
    """The record's mesh; where it is this one, another."""
    found = mesh_of(flow.world_size, record.mesh, record.where)
    if found != mesh:
        return found
    if mesh.size > 1:
        return DeviceMesh.of(*mesh.ranks[1:], mesh.ranks[0])
    return DeviceMesh.of((mesh.ranks[0] + 1) % flow.world_size)


def _outer_dim(x: ReshardingTensor) -> int:
    """The outermost dim of more than one element."""
    if not x.shape:
        raise NoSite
    return next((dim for dim, size in enumerate(x.shape) if size > 1), 0)


def _allgather(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    x = _sharded(flow, record)
    flow.set(x, Layout.replicated(x.mesh))


def _gather(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    x = _sharded(flow, record)
    flow.set(x, Layout.replicated(_other(flow, record, x.mesh)))


def _scatter(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    x = _whole(flow, record)
    dim = _outer_dim(x)
    mesh = _other(flow, record, x.mesh)
    mesh = mesh if mesh.size > 1 else ordered_mesh(flow.world_size, 2, record.where)
    flow.set(x, Layout.sharded(_some(fitting_mesh(mesh, x.shape[dim])), dim))


def _chunk(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    x = _whole(flow, record)
    dims = [d for d, size in enumerate(x.shape) if size % x.mesh.size == 0]
    if x.mesh.size == 1 or not dims:
        mesh = _several(flow, record.mesh, record.where)
        x, dims = flow.input((mesh.size, 2), Layout.replicated(mesh)), [0]
    flow.set(x, Layout.sharded(x.mesh, dims[0] if record.how % 4 else dims[-1]))


def _send_recv(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """Shard to shard, over as many ranks; now and then from one rank to another."""
    x = _whole(flow, record, single=True) if record.how % 4 == 1 else _sharded(flow, record)
    mesh = ordered_mesh(flow.world_size, x.mesh.size, record.where)
    if record.b % 4 and _ascending(x.mesh) and _ascending(mesh):  # pairs by position are then others than by rank
        mesh = DeviceMesh.of(*reversed(mesh.ranks))
    mesh = mesh if mesh != x.mesh else DeviceMesh.of(*sorted(mesh.ranks[1:]), mesh.ranks[0])
    if mesh == x.mesh:
        mesh = DeviceMesh.of((x.mesh.ranks[0] + 1) % flow.world_size)
    flow.set(x, Layout(mesh, x.layout.sharding))


def _ascending(mesh: DeviceMesh) -> bool:
    return mesh.ranks == tuple(sorted(mesh.ranks))


def _all_to_all(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    x = _sharded(flow, record)
    (before,) = x.layout.sharding
    dims = [d for d, size in enumerate(x.shape) if d != before and size % x.mesh.size == 0]
    if dims and record.how // 32 % 2 == 0:
        flow.set(x, Layout.sharded(x.mesh, dims[record.how // 8 % len(dims)]))
        return
    n, inner = x.mesh.size, 1 if dims else record.how % 2
    y = flow.input((2 * n, n), Layout.sharded(x.mesh, inner))
    flow.set(y, Layout.sharded(x.mesh, 1 - inner))


def _broadcast(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    x = _whole(flow, record)
    flow.set(x, Layout.replicated(_other(flow, record, x.mesh)))


def _local(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    x = flow.read(record.a)
    flow.set(x, x.layout)


def _odd(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """What is refused, where the program may hold that: otherwise an allgather."""
    if not flow.setting.odd:
        _allgather(flow, record)
    elif record.how % 2:  # shards of unequal sizes
        x = _sharded(flow, record)
        sizes = [n for n in range(2, flow.world_size + 1) if n != x.mesh.size and x.shape[0] % n == 0]
        if not sizes:
            raise NoSite
        flow.set(x, Layout.sharded(ordered_mesh(flow.world_size, sizes[0], record.where), _outer_dim(x)))
    else:  # a dim that is not the outermost
        mesh = _several(flow, record.mesh, record.where)
        x = flow.input((3, 2 * mesh.size), Layout.sharded(mesh, 1))
        flow.set(x, Layout.replicated(mesh))
    if flow.setting.odd:
        flow.mark("odd")


#: What writes a set, by the row.
ROWS: dict[str, Callable[[ReshardingFlow, ReshardingRecord], None]] = {
    "allgather": _allgather,
    "gather": _gather,
    "scatter": _scatter,
    "chunk": _chunk,
    "send-recv": _send_recv,
    "all-to-all": _all_to_all,
    "broadcast": _broadcast,
    "local": _local,
    "odd": _odd,
}


# ---------------------------------------------------------------------------------------------------------- reductions


def partial(flow: ReshardingFlow, record: ReshardingRecord) -> tuple[ReshardingTensor, int]:
    """A value whose parts are to be reduced over its mesh, and the dim that is."""
    found = [v for v in flow.pool if v.mesh.ndim == 1 and v.mesh.size > 1]
    form = record.how % 4
    if not found or form == 3:
        mesh = _several(flow, record.mesh, record.where)
        rows = mesh.size * (2 if record.how // 4 % 4 == 3 else 1)  # mostly one for each rank
        return flow.input((rows, *flow.setting.shape), Layout.sharded(mesh, 0)), 0
    x = found[-1 - record.a % len(found)]
    (dim,) = x.layout.sharding
    if dim is None:  # all have the same: as many addends as ranks
        return flow.call("aten::unsqueeze", x, 0, layout=Layout.sharded(x.mesh, 0)), 0
    if form == 0:  # each rank sums up its own part first
        total = x.bound * x.spec.shape[dim]
        return flow.call("aten::sum.dim_IntList", x, [dim], True, bound=total), dim
    if form == 1 and len(x.shape) > 1 and x.dtype.is_floating_point and dim == len(x.shape) - 1:
        return product(flow, x), 0
    return x, dim


def product(flow: ReshardingFlow, x: ReshardingTensor) -> ReshardingTensor:
    """Partial products of a value whose last dim is sharded."""
    columns = 2 * x.mesh.size
    weight = flow.input((x.shape[-1], columns), Layout.sharded(x.mesh, 0), x.dtype)
    lifted = flow.call("aten::unsqueeze", x, 0, layout=Layout.sharded(x.mesh, len(x.shape)))
    bound = x.bound * weight.bound * x.spec.shape[-1]
    return flow.call("aten::matmul", lifted, weight, layout=Layout.sharded(x.mesh, 0), bound=bound)


def _allreduce(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    x, dim = partial(flow, record)
    flow.reduce(x, dim, Layout.replicated(x.mesh), record.reduction)


def _reduce_scatter(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    x, dim = partial(flow, record)
    left = [size for d, size in enumerate(x.shape) if d != dim]
    fit = [d for d, size in enumerate(left) if size % x.mesh.size == 0 and all(s == 1 for s in left[:d])]
    if not fit:  # a tensor that can be scattered
        n = x.mesh.size
        x, dim = flow.input((n, 2 * n, 2), Layout.sharded(x.mesh, 0)), 0
        fit = [0]
    flow.reduce(x, dim, Layout.sharded(x.mesh, fit[0]), record.reduction)


def _rooted(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """Often to one rank outside of the mesh, which has no addend: what it gives instead depends on the reduction."""
    x, dim = partial(flow, record)
    alone = flow.world_size > 2 and record.how // 16 % 3
    if alone and x.mesh.size == flow.world_size:
        mesh = ordered_mesh(flow.world_size, flow.world_size - 1, record.where)
        x, dim = flow.input((mesh.size, *flow.setting.shape), Layout.sharded(mesh, 0)), 0
    outside = [rank for rank in range(flow.world_size) if rank not in x.mesh]
    mesh = DeviceMesh.of(outside[record.where % len(outside)]) if alone else _other(flow, record, x.mesh)
    flow.reduce(x, dim, Layout.replicated(mesh), rooted_reduction(record))


def rooted_reduction(record: ReshardingRecord) -> ReduceOp:
    """Mostly no sum."""
    others: tuple[ReduceOp, ...] = ("max", "avg", "min", "max", "product", "avg", "min")
    return record.reduction if record.b // 8 % 4 == 3 else others[record.b % 7]


def _local_sum(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """Over a dim that each rank has whole."""
    x = flow.read(record.a)
    dims = [d for d in range(len(x.shape)) if d not in x.layout.sharding]
    if not dims or len(x.shape) < 2:
        raise NoSite
    dim = dims[record.how % len(dims)]
    sharding = tuple(s if s is None or s < dim else s - 1 for s in x.layout.sharding)
    flow.reduce(x, dim, Layout(x.mesh, sharding), record.reduction)


def _odd_sum(flow: ReshardingFlow, record: ReshardingRecord) -> None:
    """What is refused, where the program may hold that: otherwise an allreduce."""
    if not flow.setting.odd:
        _allreduce(flow, record)
        return
    x, dim = partial(flow, record)
    mesh = _other(flow, record, x.mesh)
    left = [size for d, size in enumerate(x.shape) if d != dim]
    fit = fitting_mesh(mesh, left[0]) if left else None
    if fit is None or fit == x.mesh:
        raise NoSite
    flow.reduce(x, dim, Layout.sharded(fit, 0), record.reduction)
    flow.mark("odd")


#: What writes a reduction, by what it takes.
SUMS: dict[str, Callable[[ReshardingFlow, ReshardingRecord], None]] = {
    "allreduce": _allreduce,
    "reduce-scatter": _reduce_scatter,
    "reduce": _rooted,
    "local-sum": _local_sum,
    "odd-sum": _odd_sum,
}

__all__ = ["ROWS", "SUMS", "partial", "reduce_of_row", "rooted_reduction", "row_of_newest", "set_of_row"]
