"""The choices of a resharding program: a header and records of fixed width, and the meshes that bytes encode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tcverify.ops import DeviceMesh
from tcverify.ops.reductions import ReduceOp
from tcverify.strategies.choices import weighted_table

_BYTE = tuple(range(256))


@dataclass(frozen=True, slots=True)
class ReshardingSetting:
    """Settings of a whole program.

    Attributes:
        theme: which kinds of records there are; see `KINDS`.
        shape: of the (whole) tensor that it begins with.
        dtype: of all values.
        odd: whether it may contain changes that lowerings reject.
        outputs: largest number of returned values.
        mesh, where, how: initial layout; see `ReshardingRecord`.
        seed: of the input values.
    """

    theme: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    odd: bool
    outputs: int
    mesh: str
    where: int
    how: int
    seed: int


@dataclass(frozen=True, slots=True)
class ReshardingRecord:
    """One or a few steps.

    Attributes:
        kind: which.
        row: of a set, what communication it takes.
        sum: of a reduce, the same.
        reduction: how it reduces.
        a, b: which values it reads, counted from the newest.
        mesh: of which sort the mesh is; see `mesh_of`.
        where: which of them, two bytes.
        how: further choices.
    """

    kind: str
    row: str
    sum: str
    reduction: ReduceOp
    a: int
    b: int
    mesh: str
    where_low: int
    where_high: int
    how: int

    @property
    def where(self) -> int:
        return self.where_low + 256 * self.where_high


#: Sorts of meshes. The simplest is that of ranks 0 and 1.
MESHES = weighted_table(("pair", 3), ("full", 4), ("single", 3), ("subset", 3), ("ordered", 4), ("reversed", 1))

#: Per field of `ReshardingSetting`, what its byte picks from.
HEADER: dict[str, tuple[Any, ...]] = {
    "theme": weighted_table(("any", 8), ("chain", 3), ("stages", 2), ("pipelined", 4), ("scattered", 3), ("streams", 3)),
    "shape": weighted_table(
        ((12, 2), 4), ((12,), 1), ((20, 3), 1), ((4, 6), 2), ((6, 4), 2), ((8, 12), 1), ((12, 6, 2), 1), ((60,), 1), ((24, 4), 1)
    ),
    "dtype": weighted_table((torch.float32, 11), (torch.bfloat16, 2), (torch.float64, 1), (torch.int64, 2)),
    "odd": weighted_table((False, 11), (True, 2)),
    "outputs": weighted_table((1, 2), (2, 3), (3, 3), (6, 1)),
    "mesh": MESHES,
    "where": _BYTE,
    "how": _BYTE,
    "seed": _BYTE,
}  # fmt: skip

_COMMON = (("compute", 7), ("binary", 4), ("matmul", 3), ("sum", 2), ("view", 3), ("in-place", 1), ("output", 2))

#: The table of a record's kind, by theme. The first entries of a theme begin its program in any case.
KINDS: dict[str, tuple[str, ...]] = {
    "any": weighted_table(
        ("none", 3), ("set", 14), ("reduce", 11), ("grid", 5), ("stages", 1), ("streams", 1), *_COMMON
    ),
    "chain": weighted_table(("none", 2), ("set", 16), ("reduce", 3), ("compute", 6), ("binary", 1), ("output", 1)),
    "stages": weighted_table(("none", 6), ("stages", 3), ("set", 4), *_COMMON),
    "pipelined": weighted_table(("none", 10), ("pipelined", 2), ("set", 4), ("reduce", 2), *_COMMON),
    "scattered": weighted_table(("none", 10), ("scattered", 2), ("set", 4), ("reduce", 2), *_COMMON),
    "streams": weighted_table(("none", 6), ("streams", 6), ("set", 3), ("reduce", 1), *_COMMON),
}

#: Per field of `ReshardingRecord`, the table of its byte; `kind` uses `KINDS`.
RECORD: dict[str, tuple[Any, ...]] = {
    "kind": _BYTE,
    "row": weighted_table(
        ("allgather", 5), ("send-recv", 7), ("broadcast", 6), ("scatter", 4), ("gather", 6), ("all-to-all", 3), ("chunk", 2),
        ("local", 1), ("odd", 2),
    ),
    "sum": weighted_table(("allreduce", 6), ("reduce-scatter", 6), ("reduce", 15), ("local-sum", 3), ("odd-sum", 1)),
    "reduction": weighted_table(("sum", 8), ("max", 2), ("min", 1), ("product", 1), ("avg", 1)),
    "a": weighted_table((0, 6), (1, 3), (2, 1), (3, 1), (5, 1)),
    "b": _BYTE,
    "mesh": MESHES,
    "where_low": _BYTE,
    "where_high": _BYTE,
    "how": _BYTE,
}  # fmt: skip

RECORDS = 8
HEADER_WIDTH, RECORD_WIDTH = len(HEADER), len(RECORD)
#: Bytes of a whole program.
WIDTH = HEADER_WIDTH + RECORDS * RECORD_WIDTH


def decode_resharding_choices(choices: bytes) -> tuple[ReshardingSetting, tuple[ReshardingRecord, ...]]:
    """Decode any `WIDTH` bytes. Missing bytes count as 0, additional ones are ignored."""
    choices = choices.ljust(WIDTH, b"\0")
    setting = ReshardingSetting(
        *(table[byte % len(table)] for table, byte in zip(HEADER.values(), choices, strict=False))
    )
    tables = (KINDS[setting.theme], *list(RECORD.values())[1:])
    records = []
    for number in range(RECORDS):
        row = choices[HEADER_WIDTH + number * RECORD_WIDTH :][:RECORD_WIDTH]
        records.append(ReshardingRecord(*(table[byte % len(table)] for table, byte in zip(tables, row, strict=True))))
    return setting, tuple(records)


def mesh_of(world_size: int, sort: str, number: int) -> DeviceMesh:
    """The 1-D mesh of a sort, selected by a number.

    Args:
        sort: "full" are all ranks in order, "reversed" from the last; "pair" are two, "subset" some in order, "ordered" some in
            any order.
    """
    if sort in ("full", "reversed"):
        ranks = tuple(range(world_size))
        return DeviceMesh.of(*(ranks if sort == "full" else reversed(ranks)))
    if sort == "single":
        return DeviceMesh.of(number % world_size)
    if sort == "pair":
        return ordered_mesh(world_size, min(2, world_size), number)
    number, count = divmod(number, world_size)
    found = ordered_mesh(world_size, count + 1, number)
    return DeviceMesh.of(*sorted(found.ranks)) if sort == "subset" else found


def ordered_mesh(world_size: int, count: int, number: int) -> DeviceMesh:
    """Some ranks in an order that a number selects; number 0 means the first ones."""
    left, ranks = list(range(world_size)), []
    for _ in range(min(count, world_size)):
        number, at = divmod(number, len(left))
        ranks.append(left.pop(at))
    return DeviceMesh.of(*ranks)


def grid_of(world_size: int, number: int) -> DeviceMesh:
    """A mesh of two dims, selected by a number."""
    sizes = range(1, world_size + 1)
    shapes = [(rows, columns) for rows in sizes for columns in sizes if 1 < rows * columns <= world_size]
    shapes.sort(key=lambda shape: (min(shape) == 1, math.prod(shape), shape))
    number, at = divmod(number, len(shapes))
    rows, columns = shapes[at]
    return DeviceMesh((rows, columns), ordered_mesh(world_size, rows * columns, number).ranks)


def fitting_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh | None:
    """As many of the first ranks of a 1-D mesh as `size` can be divided among, or None where that is only one of several."""
    count = max(n for n in range(1, mesh.size + 1) if size % n == 0)
    return None if count == 1 < mesh.size else DeviceMesh.of(*mesh.ranks[:count])


__all__ = [
    "HEADER", "KINDS", "MESHES", "RECORD", "RECORDS", "WIDTH", "ReshardingRecord", "ReshardingSetting",
    "decode_resharding_choices", "fitting_mesh", "grid_of", "mesh_of", "ordered_mesh",
]  # fmt: skip
