"""Programs as text: one line per node, as an engineer would write it, and the difference that a pass made."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import fx

from tcverify.ops import TensorSpec, qualified_name
from tcverify.ops.dialects.host_ir import CURRENT_STREAM, STREAM
from tcverify.ops.dialects.multidevice import REDUCE, SET
from tcverify.program import Program, RankConstant
from tcverify.program.graph import constant_value

#: Types of arguments that contain layouts.
QUOTES = "'\""

#: Ops whose results represent streams, and so have no shape.
TOKENS = frozenset(name.split("::")[-1] for name in (CURRENT_STREAM, STREAM))


#: Whether a line is in both graphs (" "), only before ("-") or only after ("+") the pass.
Sign: TypeAlias = Literal[" ", "-", "+"]


@dataclass(frozen=True, slots=True)
class ListingLine:
    """One node.

    Attributes:
        mark: " " in both graphs, "-" only before, "+" only after the pass.
        node: its name.
        text: the call.
    """

    mark: Sign
    node: str
    text: str


def graph_lines(program: Program, rank: int) -> list[tuple[str, str]]:
    """Return (name, text) for every node of a rank's graph, with the rank's constants filled in."""
    binding = program.ranks[rank]
    return [(node.name, _line(node, binding.constants)) for node in program.graphs[binding.graph].nodes]


def listing_difference(before: Program, after: Program, rank: int) -> list[ListingLine]:
    """Return both graphs of a rank as one listing with the changes marked. Cost is n log n in the number of nodes."""
    old, new = graph_lines(before, rank), graph_lines(after, rank)
    places = {line: i for i, line in enumerate(old)}  # a line names its node: no two are equal
    paired = [(places[line], j) for j, line in enumerate(new) if line in places]
    kept = [paired[k] for k in longest_increasing([i for i, _ in paired])]
    lines: list[ListingLine] = []
    a = c = 0
    for b, d in [*kept, (len(old), len(new))]:
        lines += [ListingLine("-", name, text) for name, text in old[a:b]]
        lines += [ListingLine("+", name, text) for name, text in new[c:d]]
        lines += [ListingLine(" ", name, text) for name, text in old[b : b + 1]]
        a, c = b + 1, d + 1
    return lines


def longest_increasing(values: Sequence[int]) -> list[int]:
    """Return the indices of a longest increasing subsequence."""
    tails: list[int] = []  # smallest last value of an increasing subsequence, by length
    ends: list[int] = []  # its index
    previous: list[int] = []
    for i, value in enumerate(values):
        length = bisect_left(tails, value)
        previous.append(ends[length - 1] if length else -1)
        if length == len(tails):
            tails.append(value)
            ends.append(i)
        else:
            tails[length] = value
            ends[length] = i
    found = []
    i = ends[-1] if ends else -1
    while i >= 0:
        found.append(i)
        i = previous[i]
    return found[::-1]


def input_lines(program: Program, real_shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return one line per input: name, global shape, placement, recipe; and the shape that it was given with, if different."""
    rows = []
    for spec in program.inputs:
        placements = ", ".join(f"{placement} over {dim}" for dim, placement in spec.placements) or "replicated"
        dtype = str(spec.dtype).removeprefix("torch.")
        recipe = spec.recipe.kind if spec.recipe.scale == 1.0 else f"{spec.recipe.kind} × {spec.recipe.scale:.3g}"
        given = f"{list(real_shapes[spec.name])} in your program" if spec.name in real_shapes else ""
        rows.append((f"{spec.name}: {dtype}{list(spec.shape)}", placements, f"({recipe})", given))
    return columns(rows)


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns, two blanks apart.

    Args:
        right: numbers of the right-aligned columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def call_text(
    node: fx.Node, constants: Mapping[str, Any], name: Callable[[fx.Node], str], *, brief: bool = False
) -> str:
    """Return what a node does as text: "rms_norm(all_reduce, gain, 1e-06)".

    Args:
        constants: the rank's constants.
        name: gives the names of operands.
        brief: whether to omit what the result also shows, for changes of layout: "set(x, [1, 0] shard(0) → [0, 1] replicated)".
    """
    if node.op == "placeholder":
        return "input"
    if node.op == "output":
        return f"return {_value(node.args[0], constants, name)}"
    short = op_text(node)
    if brief and node.op == "call_function" and qualified_name(node.target) in (SET, REDUCE):
        return _resharding(node, constants, name)
    if short == "getitem":
        return f"{_value(node.args[0], constants, name)}[{node.args[1]}]"
    arguments = [_value(a, constants, name) for a in node.args]
    arguments += [f"{k}={_value(v, constants, name)}" for k, v in node.kwargs.items()]
    return f"{short}({', '.join(arguments)})"


def _resharding(node: fx.Node, constants: Mapping[str, Any], name: Callable[[fx.Node], str]) -> str:
    """A `set` or a `reduce`, without its shape, dtype and rank arguments."""
    operand, *asked = (_value(a, constants, name) for a in node.args)
    reduction = "" if len(node.args) < 8 else f"{asked.pop(1).strip(QUOTES)} over dim {asked.pop(0)}, "
    source, target = (layout.strip(QUOTES) for layout in asked[:2])
    return f"{op_text(node)}({operand}, {reduction}{source} → {target})"


def op_text(node: fx.Node) -> str:
    """The short name of what a node calls, "input" or "return"."""
    if node.op in ("placeholder", "output"):
        return "input" if node.op == "placeholder" else "return"
    name = qualified_name(node.target) if node.op == "call_function" else str(node.target)
    return name.split("::")[-1]


def value_text(value: Any) -> str:
    """The result of a node according to `meta["val"]`: "float32[1, 4]", a tuple of such, or nothing."""
    if isinstance(value, TensorSpec):
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(value_text, value))})"
    return "" if value is None else repr(value)


def _line(node: fx.Node, constants: Mapping[str, Any]) -> str:
    text = call_text(node, constants, _name, brief=True)
    val = node.meta.get("val")
    shape = str(list(val.shape)) if isinstance(val, TensorSpec) and op_text(node) not in TOKENS else ""
    return text if node.op == "output" else f"{node.name}{shape and f': {shape}'} = {text}"


def _name(node: fx.Node) -> str:
    return node.name


def _value(value: Any, constants: Mapping[str, Any], name: Callable[[fx.Node], str]) -> str:
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, RankConstant):
        return repr(constant_value(value, constants))
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_value(v, constants, name) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_value(v, constants, name)}" for k, v in value.items()) + "}"
    if isinstance(value, torch._ops.OpOverload):
        return qualified_name(value)
    return repr(value).removeprefix("torch.")
