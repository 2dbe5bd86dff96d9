"""The choices of asynchronous programs: a header and records of fixed width, one byte per choice, decoded totally."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tcverify.strategies.choices import weighted_table
from tcverify.strategies.timing import WIDTH as TIMING_WIDTH

_BYTE = tuple(range(256))


@dataclass(frozen=True, slots=True)
class FunctionalSetting:
    """Settings of a whole program; see `HEADER` for the values.

    Attributes:
        theme: what most of the program is, see `KINDS`.
        depth: layers of the theme that there are before anything else.
        hidden: the size of the last dim of activations.
        tokens: rows of activations, as a multiple of a number that every group divides.
        dtype: of activations, "f32" or "bf16".
        late: whether, of the collectives in flight at the end, the last is waited for first.
        data: how activations differ between ranks: "varying", "partial" or "shard" over a dim, or "replicated".
        outputs: how many values are returned at most.
        seed: of the input values.
    """

    theme: str
    depth: int
    hidden: int
    tokens: int
    dtype: str
    late: bool
    data: str
    outputs: int
    seed: int


@dataclass(frozen=True, slots=True)
class FunctionalRecord:
    """One step of writing; see `RECORD` for the values.

    Attributes:
        kind: what is written, a name of `KINDS`.
        a, b: bytes that pick operands.
        how: a byte that picks a variant.
        form: how the result of a collective is kept: "new", "in-place", "coalesced", "coalesced-in-place", "out".
        group: a byte that picks the mesh dim.
        delay: how many records pass until its wait; 0 puts it directly after the start, −1 at the end.
        use: how the result is used.
    """

    kind: str
    a: int
    b: int
    how: int
    form: str
    group: int
    delay: int
    use: str


HEADER: dict[str, tuple[Any, ...]] = {
    "theme": weighted_table(("any", 6), ("data-parallel", 5), ("tensor-parallel", 4), ("async-tp", 2), ("opaque", 2)),
    "depth": (1, 2, 2, 3, 2, 3, 4),
    "hidden": weighted_table((4, 3), (8, 4), (2, 2), (12, 1), (16, 2), (6, 1), (5, 1), (32, 1)),
    "tokens": weighted_table((1, 3), (2, 4), (4, 2), (3, 1), (8, 1)),
    "dtype": weighted_table(("f32", 4), ("bf16", 1)),
    "late": weighted_table((False, 3), (True, 1)),
    "data": weighted_table(("varying", 5), ("partial", 2), ("shard", 2), ("replicated", 1)),
    "outputs": weighted_table((3, 1), (6, 2), (2, 1), (8, 1)),
    "seed": _BYTE,
}

#: The table of a record's kind, by theme; "layer" is the theme's own.
KINDS: dict[str, tuple[str, ...]] = {
    "any": weighted_table(
        ("none", 2), ("collective", 12), ("compute", 9), ("matmul", 5), ("norm", 3), ("write", 3), ("view", 3),
        ("pair", 3), ("unshard", 2), ("gradient", 2), ("column-row", 1), ("pipelined", 1), ("exchange", 2),
        ("pipeline", 1), ("barrier", 1), ("swapped", 2), ("after", 2), ("ragged", 2), ("integers", 2), ("blocking", 1),
        ("buffer", 2), ("inputs", 1), ("partly-read", 2), ("like-ops", 2), ("pieces", 2),
    ),
    "data-parallel": weighted_table(
        ("none", 3), ("gradient", 4), ("compute", 5), ("collective", 3), ("write", 3), ("matmul", 3), ("unshard", 2),
        ("pair", 1), ("norm", 1), ("view", 1), ("after", 1), ("ragged", 1), ("integers", 1), ("barrier", 1),
        ("partly-read", 1),
    ),
    "tensor-parallel": weighted_table(
        ("none", 2), ("column-row", 3), ("collective", 5), ("compute", 5), ("norm", 3), ("matmul", 3), ("view", 2),
        ("pair", 2), ("write", 2), ("after", 1), ("blocking", 1), ("ragged", 1), ("swapped", 1), ("buffer", 1),
    ),
    "async-tp": weighted_table(
        ("none", 2), ("pipelined", 5), ("compute", 4), ("collective", 3), ("matmul", 2), ("norm", 2), ("write", 2),
        ("exchange", 1), ("view", 1), ("after", 1), ("pair", 1),
    ),
    "opaque": weighted_table(
        ("none", 2), ("exchange", 5), ("pipeline", 4), ("barrier", 3), ("collective", 6), ("compute", 5), ("matmul", 3),
        ("swapped", 3), ("write", 2), ("pair", 2), ("view", 1), ("after", 1), ("blocking", 1),
    ),
    "joint": weighted_table(
        ("none", 2), ("exchange", 4), ("barrier", 2), ("shares", 4), ("partly-read", 2), ("swapped", 2), ("gradient", 3),
        ("collective", 4),
        ("compute", 3), ("matmul", 2), ("pair", 2), ("view", 1), ("norm", 1),
    ),
}  # fmt: skip

RECORD: dict[str, tuple[Any, ...]] = {
    "kind": _BYTE,
    "a": _BYTE,
    "b": _BYTE,
    "how": _BYTE,
    "form": weighted_table(("new", 10), ("in-place", 4), ("coalesced", 2), ("coalesced-in-place", 1), ("out", 2)),
    "group": _BYTE,
    "delay": weighted_table((0, 8), (1, 4), (2, 3), (3, 1), (-1, 3)),
    "use": weighted_table(
        ("pool", 4), ("main", 6), ("users", 3), ("view", 3), ("write-operand", 3), ("update", 2), ("twice", 2),
        ("output", 2), ("later", 2), ("nothing", 1), ("slice", 2),
    ),
}  # fmt: skip

RECORDS = 16
HEADER_WIDTH, RECORD_WIDTH = len(HEADER), len(RECORD)
#: Bytes of a whole program: header, timing, records.
WIDTH = HEADER_WIDTH + TIMING_WIDTH + RECORDS * RECORD_WIDTH


def decode_setting(choices: bytes) -> FunctionalSetting:
    """Decode the header, `HEADER_WIDTH` bytes."""
    return FunctionalSetting(*(table[byte % len(table)] for table, byte in zip(HEADER.values(), choices, strict=True)))


def decode_record(theme: str, choices: bytes) -> FunctionalRecord:
    """Decode a record, `RECORD_WIDTH` bytes."""
    tables = (KINDS[theme], *list(RECORD.values())[1:])
    return FunctionalRecord(*(table[byte % len(table)] for table, byte in zip(tables, choices, strict=True)))


__all__ = [
    "HEADER", "HEADER_WIDTH", "KINDS", "RECORD", "RECORDS", "RECORD_WIDTH", "WIDTH", "FunctionalRecord", "FunctionalSetting",
    "decode_record", "decode_setting",
]  # fmt: skip
