"""The choices of tensor-parallel programs on functional collectives: a header and a record per layer, a byte per choice."""

from __future__ import annotations

from dataclasses import dataclass

from tcverify.strategies.choices import weighted_table
from tcverify.strategies.timing import WIDTH as TIMING_WIDTH

_BYTE = tuple(range(256))


@dataclass(frozen=True, slots=True)
class SequenceSetting:
    """Settings of a whole program; see `HEADER` for the values.

    Attributes:
        layers: how many; a layer is an all_reduce, a residual, a norm, and products up to the next all_reduce.
        layout: "flat" is [T, H], "batched" [B, S, H].
        tokens: how the group divides them: "sequence" divides S, "batch" B, "product" B·S alone; "square" is S = H, "members"
            S as large as the group, "uneven" none.
        hidden: H.
        dtype: "f32" or "bf16".
        entry: where the residual comes from: an input, an embedding, a gather, or an input that varies.
        data: whether activations differ over the mesh's other dim.
        seed: of the input values.
    """

    layers: int
    layout: str
    tokens: str
    hidden: int
    dtype: str
    entry: str
    data: bool
    seed: int


@dataclass(frozen=True, slots=True)
class SequenceLayer:
    """One layer; see `LAYER` for the values.

    Attributes:
        norm: which, and how it is written.
        cast: where a norm that is taken apart changes to another dtype: not, around all of it, or before the weight.
        residual: what is added to the sum, and on which side.
        reduce: how addends become a sum.
        other: whether it is over the mesh's other dim.
        view: what stands between sum and residual.
        wait: when the all_reduce is waited for, and what happens behind.
        users: what else is returned: of the sum, the residual, the norm, its statistic, or its insides.
        odd: an unusual change that may break passes, if any.
        width: of the products up to the next all_reduce, in H.
        act: the function between them.
    """

    norm: str
    cast: str
    residual: str
    reduce: str
    other: bool
    view: str
    wait: str
    users: str
    odd: str
    width: int
    act: int


HEADER = {
    "layers": (1, 2, 2, 3, 2, 1, 4),
    "layout": weighted_table(("flat", 2), ("batched", 3)),
    "tokens": weighted_table(
        ("sequence", 7), ("batch", 3), ("product", 3), ("square", 1), ("members", 2), ("uneven", 1)
    ),
    "hidden": weighted_table((8, 4), (4, 3), (2, 1), (6, 2), (16, 1)),
    "dtype": weighted_table(("f32", 4), ("bf16", 2)),
    "entry": weighted_table(("input", 5), ("embedding", 4), ("gathered", 2), ("varying", 1)),
    "data": (False, True),
    "seed": _BYTE,
}

LAYER = {
    "norm": weighted_table(
        ("apart", 7), ("product", 2), ("fused", 5), ("rms_norm", 2), ("native-layer", 3), ("layer", 1), ("tensor_cast", 1),
        ("unweighted", 1), ("none", 1),
    ),
    "cast": weighted_table(("none", 4), ("around", 3), ("before-weight", 2)),
    "residual": weighted_table(
        ("chain", 12), ("swapped", 5), ("none", 3), ("fresh", 2), ("gathered", 2), ("two", 2), ("varying", 1), ("row", 1),
        ("sliced", 1),
    ),
    "reduce": weighted_table(("sum", 16), ("avg", 2), ("max", 1), ("scattered", 2), ("coalesced", 1), ("in-place", 1)),
    "other": weighted_table((False, 8), (True, 1)),
    "view": weighted_table(
        ("none", 8), ("same", 3), ("rows", 2), ("unsqueezed", 1), ("detached", 1), ("turned", 1), ("halved", 3),
    ),
    "wait": weighted_table(("at-once", 7), ("late", 3), ("twice", 4), ("write-behind", 1)),
    "users": weighted_table(
        ("none", 8), ("sum", 3), ("residual", 2), ("normed", 1), ("statistic", 4), ("inside", 2), ("view", 1),
    ),
    "odd": weighted_table(
        ("none", 20), ("eps-in-place", 1), ("weight-varies", 3), ("weight-per-row", 4), ("over-tokens", 6), ("cube", 1),
        ("power-by-rank", 2), ("alpha", 1), ("residual-written", 1), ("sum-written", 1), ("no-keepdim", 1), ("swapped-waits", 5),
    ),
    "width": (1, 2, 1, 4),
    "act": (0, 1, 2, 3),
}  # fmt: skip

LAYERS = 4
HEADER_WIDTH, LAYER_WIDTH = len(HEADER), len(LAYER)
#: Bytes of a whole program: header, timing, layers.
WIDTH = HEADER_WIDTH + TIMING_WIDTH + LAYERS * LAYER_WIDTH


def decode_sequence_setting(choices: bytes) -> SequenceSetting:
    """Decode the header, `HEADER_WIDTH` bytes."""
    return SequenceSetting(*(table[byte % len(table)] for table, byte in zip(HEADER.values(), choices, strict=True)))


def decode_layer(choices: bytes) -> SequenceLayer:
    """Decode a layer, `LAYER_WIDTH` bytes."""
    return SequenceLayer(*(table[byte % len(table)] for table, byte in zip(LAYER.values(), choices, strict=True)))


__all__ = [
    "HEADER", "HEADER_WIDTH", "LAYER", "LAYERS", "LAYER_WIDTH", "WIDTH", "SequenceLayer", "SequenceSetting", "decode_layer",
    "decode_sequence_setting",
]  # fmt: skip
