"""The choices of a program: one byte per choice, decoded totally.

A program is a header and one record per block, all of fixed width, so that shrinking one choice does not change the meaning
of others. A byte selects from a table modulo its length; entry 0 is the simplest, so that a byte of 0 switches its part off.
More likely entries occur several times in a table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tcverify.program.inputs import RecipeKind

_Table = tuple[Any, ...]


def weighted_table(*entries: tuple[Any, int]) -> _Table:
    """A table in which each entry occurs the given number of times."""
    return tuple(entry for entry, times in entries for _ in range(times))


@dataclass(frozen=True, slots=True)
class TransformerSetting:
    """Settings of a whole program; see `HEADER` for the values.

    Attributes:
        layers: attention and MLP blocks, in turn, count as one layer.
        layout: "flat" is [B·S, H] ([S, H] for a batch of one), "bsh" [B, S, H], "sbh" [S, B, H].
        batch: B.
        sequence: (a, b) for S = a·n + b with n ranks in the largest tp group, at least 1; None for S = H.
        hidden: H.
        dtypes: "f32", "bf16", or bf16 with float32 in norm weights, the residual, or the collectives.
        entry: what x is and how it is processed before the first block.
        data: how activations are placed over dp.
        eps: of all norms.
        degenerate: recipe of the activations of a degenerate program, else None.
        nest: how several outputs are returned.
        seed: of the input values.
    """

    layers: int
    layout: str
    batch: int
    sequence: tuple[int, int] | None
    hidden: int
    dtypes: str
    entry: str
    data: str
    eps: float
    degenerate: RecipeKind | None
    nest: str
    seed: int


@dataclass(frozen=True, slots=True)
class BlockChoices:
    """One block: mixer → projection → collective → [view, marker] → residual and norm; see `BLOCK` for the values.

    Attributes:
        mixer: what produces the addends: an attention or MLP variant, by a table of its own; "direct" is a partial input.
        width: picks heads or the MLP's width.
        bias: where a bias is added, relative to the collective.
        reduce: the collective.
        dp: whether the block is parallel over dp, where the mesh has it, and not tp.
        view: where the layout changes between 2-D and 3-D, or [B, S, H] and [S, B, H].
        region: where markers and copies stand.
        norm: how residual and norm follow.
        residual: which residual is added.
        users: other readers of the collective's result.
        inside: whether they read it after the marker.
        twin: whether addends whose sum is normed are also summed over the mesh's other dim, where it has one and its groups
            have several ranks; that sum is normed and returned.
        keep: what is returned besides the last value.
        tie: whether weights of earlier blocks are used again.
        mask: whether attention has a mask.
        linear: how the row-parallel projection back to H is quantised, where there is one.
        align: whether a residual of other rank, where it broadcasts, is viewed as the addend's shape first.
    """

    mixer: str
    width: int
    bias: str
    reduce: str
    dp: bool
    view: str
    region: str
    norm: str
    residual: str
    users: str
    inside: bool
    twin: bool
    keep: str
    tie: bool
    mask: bool
    linear: str
    align: bool


_BYTE = tuple(range(256))

#: Per field of `TransformerSetting`, the table of its byte.
HEADER: dict[str, _Table] = {
    "layers": weighted_table((1, 6), (2, 5), (3, 3), (4, 1)),
    "layout": weighted_table(("flat", 6), ("bsh", 7), ("sbh", 2)),
    "batch": weighted_table((1, 6), (2, 6), (3, 1), (4, 2)),
    "sequence": weighted_table(
        ((1, 0), 6),
        ((2, 0), 10),
        ((4, 0), 3),
        ((3, 0), 1),
        (None, 1),
        ((1, 1), 1),
        ((0, 1), 1),
        ((1, -1), 1),
        ((2, 1), 1),
    ),
    "hidden": weighted_table((4, 4), (8, 5), (12, 3), (16, 2), (6, 2), (5, 1)),
    "dtypes": weighted_table(("f32", 9), ("bf16", 4), ("bf16-norm32", 1), ("bf16-residual32", 1), ("bf16-reduce32", 1)),
    "entry": weighted_table(("none", 2), ("norm", 9), ("reduce", 3), ("varying", 1)),
    "data": weighted_table(("replicated", 5), ("varying", 1), ("shard", 2)),
    "eps": (1e-6, 1e-5, 1e-3),
    "degenerate": weighted_table((None, 38), ("zero_rows", 1), ("cancelling", 1)),
    "nest": weighted_table(("tuple", 12), ("list", 1), ("dict", 1), ("nested", 1)),
    "seed": _BYTE,
}

ATTENTION = weighted_table(("none", 2), ("direct", 4), ("row", 2), ("bare-attention", 1), ("attention", 7))
MLP = weighted_table(("none", 2), ("direct", 3), ("row", 2), ("bare-silu", 1), ("silu", 3), ("gelu", 3), ("swiglu", 3))

#: Per field of `BlockChoices`, the table of its byte; `mixer` uses ATTENTION or MLP.
BLOCK: dict[str, _Table] = {
    "mixer": ATTENTION,
    "width": _BYTE,
    "bias": weighted_table(("none", 14), ("before", 2), ("column", 2), ("column-before", 1), ("after", 1)),
    "reduce": weighted_table(("none", 1), ("all_reduce", 18), ("fused", 3), ("scatter-gather", 1)),
    "dp": weighted_table((False, 4), (True, 1)),
    "view": weighted_table(("none", 12), ("before", 1), ("between", 5), ("behind", 1), ("transpose", 1)),
    "region": weighted_table(("none", 8), ("begin", 4), ("begin-end", 2), ("begin-end-copy", 1), ("copy", 1), ("end-copy", 1)),
    "norm": weighted_table(
        ("none", 1), ("rms", 4), ("fused", 3), ("unfused", 11), ("fused-swapped", 1), ("fused2", 9), ("fused2-swapped", 2),
        ("layer", 1),
    ),
    "residual": weighted_table(("stream", 10), ("input", 2), ("reduced", 1), ("varying", 1), ("first", 1)),
    "users": weighted_table(("none", 10), ("output", 2), ("norm", 1), ("gelu", 1), ("add", 2), ("fused", 1)),
    "inside": (False, True),
    "twin": weighted_table((False, 1), (True, 1)),
    "keep": weighted_table(("none", 16), ("hidden", 1), ("residual", 2), ("tuple", 1)),
    "tie": weighted_table((False, 5), (True, 1)),
    "mask": weighted_table((False, 3), (True, 1)),
    "linear": weighted_table(("float", 72), ("int8", 2), ("int4", 2), ("fp8", 1), ("mxfp4", 1)),
    "align": (False, True),
}  # fmt: skip

LAYERS = max(HEADER["layers"])
HEADER_WIDTH = len(HEADER)
BLOCK_WIDTH = len(BLOCK)
#: Bytes of a whole program.
WIDTH = HEADER_WIDTH + 2 * LAYERS * BLOCK_WIDTH

_ATTENTION_BLOCK = (ATTENTION, *list(BLOCK.values())[1:])
_MLP_BLOCK = (MLP, *list(BLOCK.values())[1:])
_HEADER = tuple(HEADER.values())


def decode_choices(choices: bytes, times: int = 1) -> tuple[TransformerSetting, tuple[BlockChoices, ...]]:
    """Decode any `WIDTH` bytes. Missing bytes count as 0, additional ones are ignored.

    Args:
        times: factor of the length of sequences and of the hidden size, for programs as large as those that run on a device.
    """
    choices = choices.ljust(WIDTH, b"\0")
    setting = TransformerSetting(*(table[byte % len(table)] for table, byte in zip(_HEADER, choices, strict=False)))
    if times != 1:
        sequence = None if setting.sequence is None else (times * setting.sequence[0], times * setting.sequence[1])
        setting = replace(setting, hidden=times * setting.hidden, sequence=sequence)
    blocks = []
    for number in range(2 * setting.layers):
        start = HEADER_WIDTH + number * BLOCK_WIDTH
        tables = _MLP_BLOCK if number % 2 else _ATTENTION_BLOCK
        record = choices[start : start + BLOCK_WIDTH]
        blocks.append(BlockChoices(*(table[byte % len(table)] for table, byte in zip(tables, record, strict=True))))
    return setting, tuple(blocks)


def encode_choices(setting: dict[str, Any], blocks: list[dict[str, Any]]) -> bytes:
    """Return the choices that decode to these fields; omitted fields get the simplest value. For tests.

    Raises:
        ValueError: a table has no such value.
    """
    found = bytearray(WIDTH)
    for i, name in enumerate(HEADER):
        found[i] = HEADER[name].index(setting.get(name, HEADER[name][0]))
    found[0] = HEADER["layers"].index(setting.get("layers", max(1, -(-len(blocks) // 2))))
    for number, block in enumerate(blocks):
        start = HEADER_WIDTH + number * BLOCK_WIDTH
        for i, name in enumerate(BLOCK):
            table = (MLP if number % 2 else ATTENTION) if name == "mixer" else BLOCK[name]
            found[start + i] = table.index(block.get(name, table[0]))
    unknown = {key for block in blocks for key in block} - set(BLOCK) | set(setting) - set(HEADER)
    if unknown:
        raise ValueError(f"no such choices: {sorted(unknown)}")
    return bytes(found)
