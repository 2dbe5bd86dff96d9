"""The choices of FSDP programs: a header and one record per layer, one byte per choice, decoded totally."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tcverify.strategies.choices import weighted_table
from tcverify.strategies.timing import WIDTH as TIMING_WIDTH


@dataclass(frozen=True, slots=True)
class FsdpSetting:
    """Settings of a whole program; see `HEADER` for the values.

    Attributes:
        layers: how many there are.
        tokens: rows of the activations.
        hidden: their last size, as a multiple of a number that all groups divide.
        uneven: 1 where the groups do not divide it, so that shards are padded, else 0.
        dtypes: "f32"; "bf16"; "mixed": float32 shards that are cast to bf16 before they are gathered, and gradients that are
            reduced in float32; "low": the same with gradients reduced in bf16; "late": shards are cast when they are copied out.
        gather: "functional" all_gathers allocate a new buffer, "out" ones write into the buffer of the copy-in.
        copy_out: how a gathered buffer is split: "split-copy" into new memory; "views" that are cloned; "whole": the same,
            but a view of all of it if a layer has one parameter; "direct": a split-copy into the unsharded parameters.
        target: "input": what is gathered is copied into unsharded parameters, which are inputs; "value": it is used as it is.
        prologue: whether unsharded parameters are freed at the very beginning, as FSDP leaves them between two graphs.
        backward: whether gradients are computed, reduced and scattered.
        reshard: whether layers free their parameters after the forward and gather them again for the backward.
        prefetch: when the next layer's all_gather starts: "none": when this layer has been computed; "early": before it is
            computed; "overlapping": before its own all_gather is waited for.
        reduce: of gradients.
        dims: which mesh dims parameters are sharded over: "main", or "alternate" from layer to layer.
        hybrid: whether gradients are all_reduced over another dim besides.
        accumulate: what happens to a sharded gradient: "new", "cast" to float32, or "add": it is added to an input in place.
        seed: of the input values.
    """

    layers: int
    tokens: int
    hidden: int
    uneven: int
    dtypes: str
    gather: str
    copy_out: str
    target: str
    prologue: bool
    backward: bool
    reshard: bool
    prefetch: str
    reduce: str
    dims: str
    hybrid: bool
    accumulate: str
    seed: int


@dataclass(frozen=True, slots=True)
class FsdpLayer:
    """One layer; see `LAYER` for the values.

    Attributes:
        kind: "linear"; "norm": a norm with a weight before it; "mlp": two matrices; "bias": with a bias.
        width: the inner size of an mlp, as a multiple of the hidden size.
        reuse: whether the layer runs an earlier layer's parameters again.
        share: whether it then gathers the shards as they were cast the first time.
        twist: an unusual change, left out if it does not fit.
        late: whether its parameters are freed only after the next layer.
    """

    kind: str
    width: int
    reuse: bool
    share: bool
    twist: str
    late: bool


HEADER: dict[str, tuple[Any, ...]] = {
    "layers": weighted_table((1, 2), (2, 6), (3, 4), (4, 2)),
    "tokens": weighted_table((2, 3), (4, 3), (3, 1), (1, 1)),
    "hidden": weighted_table((1, 4), (2, 3), (3, 1)),
    "uneven": weighted_table((0, 4), (1, 1)),
    "dtypes": weighted_table(("f32", 6), ("mixed", 4), ("bf16", 1), ("low", 1), ("late", 1)),
    "gather": weighted_table(("functional", 3), ("out", 1)),
    "copy_out": weighted_table(("split-copy", 6), ("views", 2), ("whole", 2), ("direct", 1)),
    "target": weighted_table(("input", 4), ("value", 1)),
    "prologue": weighted_table((True, 3), (False, 2)),
    "backward": weighted_table((True, 3), (False, 2)),
    "reshard": weighted_table((True, 4), (False, 1)),
    "prefetch": weighted_table(("none", 6), ("early", 3), ("overlapping", 2)),
    "reduce": weighted_table(("avg", 1), ("sum", 1)),
    "dims": weighted_table(("main", 3), ("alternate", 1)),
    "hybrid": weighted_table((False, 2), (True, 1)),
    "accumulate": weighted_table(("new", 3), ("cast", 2), ("add", 1)),
    "seed": tuple(range(256)),
}

#: - "buffer-read": the buffer of the copy-in is read after its all_gather; "buffer-returned": and returned.
#: - "buffer-reused": the next layer copies into the same buffer.
#: - "kept": the unsharded parameter is not freed at the end; "returned": and returned.
#: - "written": something else writes into it; "early-use": it is used before anything has been copied into it.
#: - "overwritten": what was copied into it is overwritten before it is used.
#: - "stale-view": the backward uses a view of it that the forward has made.
#: - "by-view": it is used by a view; "returned-view": and a view of it that was used is returned as a copy.
#: - "stepped": its shards change before they are gathered again, for another layer or for the backward.
#: - "free-twice", "resize-full": it is freed twice, allocated twice.
TWISTS = weighted_table(
    ("none", 21), ("stepped", 3), ("buffer-read", 2), ("buffer-returned", 1), ("buffer-reused", 3), ("kept", 1), ("returned", 1),
    ("written", 1), ("early-use", 1), ("overwritten", 1), ("stale-view", 2), ("by-view", 4), ("returned-view", 1),
    ("free-twice", 1), ("resize-full", 1),
)  # fmt: skip

LAYER: dict[str, tuple[Any, ...]] = {
    "kind": weighted_table(("linear", 3), ("norm", 3), ("mlp", 3), ("bias", 2)),
    "width": (1, 2, 3),
    "reuse": weighted_table((False, 4), (True, 1)),
    "share": (True, False),
    "twist": TWISTS,
    "late": weighted_table((False, 5), (True, 1)),
}

HEADER_WIDTH = len(HEADER)
LAYER_WIDTH = len(LAYER)
MOST_LAYERS = max(HEADER["layers"])
#: Bytes of a whole program: header, timing, layers.
WIDTH = HEADER_WIDTH + TIMING_WIDTH + MOST_LAYERS * LAYER_WIDTH


def decode_fsdp_choices(choices: bytes) -> tuple[FsdpSetting, tuple[FsdpLayer, ...], bytes]:
    """Decode any bytes; missing ones count as 0, additional ones are ignored. The third part is the timing."""
    choices = choices.ljust(WIDTH, b"\0")
    setting = FsdpSetting(*_picked(HEADER, choices))
    rest = choices[HEADER_WIDTH + TIMING_WIDTH :]
    layers = tuple(FsdpLayer(*_picked(LAYER, rest[i * LAYER_WIDTH :])) for i in range(setting.layers))
    return setting, layers, choices[HEADER_WIDTH : HEADER_WIDTH + TIMING_WIDTH]


def encode_fsdp_choices(setting: dict[str, Any], layers: list[dict[str, Any]]) -> bytes:
    """Return the choices that decode to these fields; omitted fields get the first of their values. For tests.

    Raises:
        ValueError: a table has no such value.
    """
    header = {**setting, "layers": max(1, len(layers))}
    parts = [_chosen(HEADER, header), bytes(TIMING_WIDTH), *[_chosen(LAYER, layer) for layer in layers]]
    return b"".join(parts).ljust(WIDTH, b"\0")


def _picked(tables: dict[str, tuple[Any, ...]], choices: bytes) -> list[Any]:
    return [table[byte % len(table)] for table, byte in zip(tables.values(), choices, strict=False)]


def _chosen(tables: dict[str, tuple[Any, ...]], fields: dict[str, Any]) -> bytes:
    unknown = set(fields) - set(tables)
    if unknown:
        raise ValueError(f"no such choices: {sorted(unknown)}")
    return bytes(table.index(fields.get(name, table[0])) for name, table in tables.items())
