"""Writes blocks of experts, and attention that every rank computes in full: what sequence parallelism keeps on local tokens.

A layer is an attention block, parallel over the ranks as in structured programs or computed by all of them, and a block of
experts: gate → top-k → routing → products by expert → the way back → weighed sum, with a shared expert beside them. Weights of
the experts are on every rank; if they are not, or if something depends on the number of tokens, a rewrite by tokens
must leave the block unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tcverify.program import VARYING, Mesh, Program, Recipe, shard
from tcverify.strategies.choices import (
    BLOCK_WIDTH,
    HEADER_WIDTH,
    BlockChoices,
    TransformerSetting,
    decode_choices,
    weighted_table,
)
from tcverify.strategies.draft import RANK, DraftGroup, DraftValue, PerRank
from tcverify.strategies.transformer.mixers import mix
from tcverify.strategies.transformer.programs import all_reduce, begin_program, enter, finish_block, finish_program
from tcverify.strategies.transformer.writing import (
    F32,
    TransformerWriter,
    activation,
    add,
    bias,
    cast,
    layout_of,
    matmul,
    projection,
    relayout,
    weight,
)


@dataclass(frozen=True, slots=True)
class Experts:
    """One block of experts and the attention in front of it; see `FIELDS` for the values.

    Attributes:
        attention: "parallel" as in structured programs; "whole": every rank computes it and its projection; "later": whole,
            but in the first layer.
        where: the experts: "none" leaves the block out; "here": all on every rank; "columns": each divided over the ranks,
            with partial sums; "exchanged": rows are sent to other ranks and back; "chunks": loads stand in the graph;
            "capacity": rows behind a number of them that the tokens give are dropped.
        count: E.
        choices: picks top_k, from 1 to E.
        features: picks the width of each expert.
        gate: its logits: "plain", with a "bias", computed in "float32", by weights that are "varying" between ranks, or summed
            over the ranks ("reduced").
        renormalised: whether the weights of the chosen experts are divided by their sum.
        activation: between an expert's two products.
        biased: whether the experts have biases.
        shared: a shared expert: on every rank ("plain", "gated" by a sigmoid), or divided over them ("parallel").
        keep: what is returned besides.
        tidy: whether the context of both blocks is as in most models: a residual that continues, and no other readers.
    """

    attention: str
    where: str
    count: int
    choices: int
    features: int
    gate: str
    renormalised: bool
    activation: str
    biased: bool
    shared: str
    keep: str
    tidy: bool


_BYTE = tuple(range(256))

#: Per field of `Experts`, what its byte picks from.
FIELDS: dict[str, tuple[Any, ...]] = {
    "attention": weighted_table(("parallel", 3), ("later", 5), ("whole", 1)),
    "where": weighted_table(("none", 2), ("here", 18), ("columns", 3), ("exchanged", 1), ("chunks", 2), ("capacity", 1)),
    "count": weighted_table((2, 4), (3, 4), (4, 5), (1, 1), (5, 1)),
    "choices": _BYTE,
    "features": weighted_table((2, 3), (4, 2), (3, 1)),
    "gate": weighted_table(("plain", 14), ("bias", 3), ("float32", 2), ("varying", 1), ("reduced", 1)),
    "renormalised": (False, True),
    "activation": ("silu", "gelu", "swiglu"),
    "biased": weighted_table((False, 2), (True, 1)),
    "shared": weighted_table(("none", 4), ("plain", 4), ("gated", 2), ("parallel", 2)),
    "keep": weighted_table(("none", 12), ("indices", 3), ("weights", 1), ("rows", 1), ("routed", 1)),
    "tidy": weighted_table((False, 1), (True, 2)),
}  # fmt: skip

LAYERS = 2
#: Bytes of a whole program: a header and blocks as of structured programs, and the fields of each layer.
WIDTH = HEADER_WIDTH + LAYERS * (2 * BLOCK_WIDTH + len(FIELDS))


def decode_experts(mesh: Mesh, choices: bytes, times: int = 1) -> Program:
    """Decode any bytes into a program of layers with experts.

    Args:
        times: factor of the sizes of activations; see `decode_choices`.
    """
    choices = choices.ljust(WIDTH, b"\0")
    plain = HEADER_WIDTH + 2 * LAYERS * BLOCK_WIDTH
    setting, blocks = decode_choices(choices[:plain], times)
    rows = [choices[plain + i * len(FIELDS) : plain + (i + 1) * len(FIELDS)] for i in range(LAYERS)]
    found = [
        Experts(*(table[byte % len(table)] for table, byte in zip(FIELDS.values(), row, strict=True))) for row in rows
    ]
    setting = replace(setting, layers=min(setting.layers, LAYERS))
    return write_experts(mesh, setting, blocks[: 2 * setting.layers], found[: setting.layers])


def write_experts(
    mesh: Mesh, setting: TransformerSetting, blocks: tuple[BlockChoices, ...], layers: list[Experts]
) -> Program:
    """Write the program of these choices: per layer two blocks, of which the second says what stands around the experts."""
    w = begin_program(mesh, setting)
    enter(w)
    for number, layer in enumerate(layers):
        w.draft.scope = (f"layer {number}",)
        first, second = blocks[2 * number : 2 * number + 2]
        if layer.tidy:
            first, second = _tidy(first), _tidy(second)
        dim = w.roles.other if first.dp and w.roles.other is not None else w.roles.main
        if layer.attention == "whole" or (layer.attention == "later" and number):
            finish_block(w, _unreduced(first), dim, _whole_attention(w, first, dim), None)
        else:
            addend, width = mix(w, first, dim, attention=True)
            finish_block(w, first, dim, addend, width)
        dim = w.roles.other if second.dp and w.roles.other is not None else w.roles.main
        if layer.where == "none":
            finish_block(w, _unreduced(second), dim, w.hidden, None)
            continue
        made = _experts(w, layer, second, dim)
        block = _unreduced(second)
        finish_block(w, replace(block, reduce="all_reduce") if layer.where == "columns" else block, dim, made, None)
    w.draft.scope = ()
    return finish_program(w, "experts")


def _unreduced(block: BlockChoices) -> BlockChoices:
    """What stands around a value that is the same on all ranks already."""
    return replace(block, reduce="none", bias="none", twin=False)


def _tidy(block: BlockChoices) -> BlockChoices:
    norm = {"rms": "unfused", "none": "fused2", "layer": "fused2", "fused": "fused2"}.get(block.norm, block.norm)
    return replace(block, norm=norm, reduce="all_reduce", residual="stream", users="none", bias="none", dp=False)


# ---------------------------------------------------------------------------------------------------------- attention


def _whole_attention(w: TransformerWriter, block: BlockChoices, dim: str) -> DraftValue:
    """Attention of replicated weights, and its projection back to H; in some programs that differs between ranks."""
    size, heads, hidden = 2, 1 + block.width % 2, w.setting.hidden
    odd = (dim, VARYING) if block.width % 5 == 4 else None
    x = cast(w, w.hidden, w.dtype)
    careful = replace(x, rms=1.5 * x.rms)
    query, key, value = (
        matmul(w, source, role, (hidden, heads * size), None, block.tie)
        for source, role in ((careful, "wq"), (careful, "wk"), (x, "wv"))
    )
    inner = layout_of(w, "bs", w.batch == 1 and w.hidden.layout.flat)
    query, key, value = (relayout(w, v, inner) for v in (query, key, value))
    leading = [w.sequence] if inner.flat else [w.batch, w.sequence]
    key, value = (w.draft.call("aten::view", v, [*leading, -1, size]) for v in (key, value))
    args = (query, key, value, None, None, None, None, None)
    mixed = replace(w.draft.call("tensor_cast::attention", *args, labels=("whole-attention",)), dense=True)
    mixed = replace(mixed, rms=0.8 * value.rms / max(1.0, w.sequence**0.5))
    out = matmul(w, relayout(w, mixed, w.hidden.layout), "wout", (heads * size, hidden), odd, block.tie)
    return bias(w, out, hidden, None, block.tie) if block.bias != "none" else out


# ------------------------------------------------------------------------------------------------------------ experts


def _experts(w: TransformerWriter, layer: Experts, block: BlockChoices, dim: str) -> DraftValue:
    """Route what the block reads, and return the sum over the experts, in the layout of the tokens."""
    x = cast(w, w.hidden, w.dtype)
    top_k = 1 + layer.choices % layer.count
    shape = f"top-{top_k}" if top_k < layer.count else "all-experts"
    labels = ("experts", f"experts-{layer.where}", shape)
    both = w.draft.call(
        "tensor_cast::moe_gating_top_k_softmax", _logits(w, layer, block, dim), top_k, like=x, labels=labels
    )
    shares = replace(w.draft.item(both, 0), rms=0.5)
    indices = w.draft.item(both, 1)
    if layer.renormalised:
        total = w.draft.call("aten::sum.dim_IntList", shares, [-1], True, labels=("renormalised",))
        shares = w.draft.call("aten::div.Tensor", shares, total)
    if layer.gate == "float32":
        shares = cast(w, replace(shares, dtype=F32), w.dtype)
    rows = w.draft.call("tensor_cast::init_routing_v2", x, indices)
    made = _products(w, layer, block, dim, rows, indices, top_k)
    back = w.draft.call("tensor_cast::unpermute_tokens", made, indices)
    column = w.draft.call("aten::unsqueeze", shares, -1)
    weighed = w.draft.call("aten::mul.Tensor", back, column)
    routed = replace(w.draft.call("aten::sum.dim_IntList", weighed, [-2]), rms=0.4, dense=True)
    kept = {"indices": indices, "weights": shares, "rows": made, "routed": routed}.get(layer.keep)
    if kept is not None:
        w.extras.append(kept)
    return _with_shared(w, layer, block, dim, x, routed)


def _logits(w: TransformerWriter, layer: Experts, block: BlockChoices, dim: str) -> DraftValue:
    sizes = (w.setting.hidden, layer.count)
    x = cast(w, w.hidden, F32 if layer.gate == "float32" else w.dtype)
    far = replace(x, rms=x.rms / 2)  # logits that lie apart
    op = "aten::mm" if x.layout.flat else "aten::matmul"
    if layer.gate == "float32":
        gate = w.draft.input("wgate", sizes, F32, w.roles.declared([]), Recipe(scale=1.0))
        return w.draft.call(op, x, gate, labels=("gate-float32",))
    if layer.gate == "varying":
        return matmul(w, far, "wgate", sizes, (dim, VARYING), block.tie)
    if layer.gate == "reduced":
        width = 2 * w.roles.multiple(dim)
        axis = 1 if x.layout.flat else 2
        features = activation(w, "features", x.layout, (dim, shard(axis)), w.dtype, Recipe(), width)
        return all_reduce(w, matmul(w, features, "wgate", (width, layer.count), (dim, shard(0)), block.tie), dim)
    logits = matmul(w, far, "wgate", sizes, None, block.tie)
    return bias(w, logits, layer.count, None, block.tie) if layer.gate == "bias" else logits


def _products(
    w: TransformerWriter,
    layer: Experts,
    block: BlockChoices,
    dim: str,
    rows: DraftValue,
    indices: DraftValue,
    top_k: int,
) -> DraftValue:
    """Both products of every expert, and its activation."""
    hidden, number = w.setting.hidden, w.batch * w.sequence * top_k
    features = layer.features * (w.roles.multiple(dim) if layer.where == "columns" else 1)
    if layer.where == "chunks":
        return _chunks(w, layer, block, rows, number, top_k)
    if layer.where == "exchanged" and all(number % size == 0 for size in w.roles.sizes(dim)):
        rows = _exchange(w, rows, dim, number)
        inner = w.draft.call("aten::mm", rows, projection(w, rows, "wup", (hidden, features), (dim, VARYING), False))
        inner = replace(w.draft.call("tensor_cast::silu", inner), rms=0.25)
        down = projection(w, inner, "wdown", (features, hidden), (dim, VARYING), False)
        return _exchange(w, w.draft.call("aten::mm", inner, down), dim, number)
    columns = layer.where == "columns"
    up_placement, down_placement = ((dim, shard(2)), (dim, shard(1))) if columns else (None, None)

    def product(value: DraftValue, role: str, sizes: tuple[int, int], placement: Any) -> DraftValue:
        matrices = projection(w, value, role, (layer.count, *sizes), placement, block.tie)
        vector = None
        if layer.biased and placement is None:
            vector = weight(w, "bias", (layer.count, sizes[1]), None, Recipe(scale=0.5), block.tie)
        made = w.draft.call("tensor_cast::routed_matmul", value, matrices, vector, indices)
        return replace(made, rms=0.6)

    inner = product(rows, "wup", (hidden, features), up_placement)
    if layer.activation == "swiglu":
        other = product(rows, "wgated", (hidden, features), up_placement)
        inner = w.draft.call("tensor_cast::swiglu", inner, other)
    else:
        inner = w.draft.call(f"tensor_cast::{layer.activation}", inner)
    made = product(replace(inner, rms=0.25), "wdown", (features, hidden), down_placement)
    if layer.where == "capacity" and number > 1:
        capacity = -(-number * 3 // 4)
        kept = w.draft.call("aten::slice.Tensor", made, 0, 0, capacity, labels=("capacity",))
        made = w.draft.call("aten::constant_pad_nd", kept, [0, 0, 0, number - capacity], 0.0)
    return made


def _chunks(
    w: TransformerWriter, layer: Experts, block: BlockChoices, rows: DraftValue, number: int, top_k: int
) -> DraftValue:
    """Products of chunks whose sizes are written down: right if every token chooses every expert, else as if loads were even."""
    sizes = [number // layer.count + (i < number % layer.count) for i in range(layer.count)]
    for role, shape in (("wup", (w.setting.hidden, layer.features)), ("wdown", (layer.features, w.setting.hidden))):
        split = w.draft.call("aten::split_with_sizes", rows, sizes)
        parts = [w.draft.item(split, i) for i in range(layer.count)]
        matrices = [projection(w, rows, role, shape, None, block.tie) for _ in parts]
        rows = w.draft.call("tensor_cast::grouped_matmul", parts, matrices, [None] * layer.count)
        rows = replace(rows, rms=0.6)
    return rows


def _exchange(w: TransformerWriter, rows: DraftValue, dim: str, number: int) -> DraftValue:
    """Send each rank of the group its part of the rows."""

    def of(rank: int) -> list[int]:
        members = len(w.draft.mesh.dim(dim).group(rank))
        return [number // members] * members

    sizes = PerRank(f"parts_{dim}_{number}", of)
    args = (rows, sizes, sizes, RANK, DraftGroup(dim))
    return w.draft.call("tensor_cast::all_to_all", *args, labels=("exchanged",))


def _with_shared(
    w: TransformerWriter, layer: Experts, block: BlockChoices, dim: str, x: DraftValue, routed: DraftValue
) -> DraftValue:
    if layer.shared == "none":
        return routed
    parallel = layer.shared == "parallel"
    width = layer.features * (w.roles.multiple(dim) if parallel else 1)
    up_placement, down_placement = ((dim, shard(1)), (dim, shard(0))) if parallel else (None, None)
    inner = matmul(w, x, "wshared", (w.setting.hidden, width), up_placement, block.tie)
    inner = replace(w.draft.call("tensor_cast::silu", inner), rms=0.25)
    made = matmul(w, inner, "wback", (width, w.setting.hidden), down_placement, block.tie)
    if parallel and layer.where != "columns":  # with the routed experts' partial sums, else by itself
        made = all_reduce(w, made, dim)
    elif layer.where == "columns" and not parallel:
        return routed
    if layer.shared == "gated":
        gate = matmul(w, x, "wsigmoid", (w.setting.hidden, 1), None, block.tie)
        gate = w.draft.call("aten::sigmoid", gate)
        made = w.draft.call("aten::mul.Tensor", made, gate)
    return add(w, routed, made, f"shared-{layer.shared}")
