"""Programs as text: one line per node, as an engineer writes it, and the difference that a pass made."""

from __future__ import annotations

import difflib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tcverify.ops import TensorSpec, qualified_name
from tcverify.program import Program, RankConstant
from tcverify.program.graph import constant_value


@dataclass(frozen=True, slots=True)
class Line:
    """One node.

    Attributes:
        mark: " " in both graphs, "-" only before, "+" only after the pass.
        node: its name.
        text: the call.
    """

    mark: str
    node: str
    text: str


def graph_lines(program: Program, rank: int) -> list[tuple[str, str]]:
    """Return (name, text) for every node of a rank's graph, with the rank's constants filled in."""
    binding = program.ranks[rank]
    return [(node.name, _line(node, binding.constants)) for node in program.graphs[binding.graph].nodes]


def difference(before: Program, after: Program, rank: int) -> list[Line]:
    """Return both graphs of a rank as one listing with the changes marked."""
    old, new = graph_lines(before, rank), graph_lines(after, rank)
    matcher = difflib.SequenceMatcher(a=[t for _, t in old], b=[t for _, t in new], autojunk=False)
    lines: list[Line] = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            lines += [Line(" ", name, text) for name, text in old[a:b]]
        else:
            lines += [Line("-", name, text) for name, text in old[a:b]]
            lines += [Line("+", name, text) for name, text in new[c:d]]
    return lines


def input_lines(program: Program) -> list[str]:
    """Return one line per input: name, local shapes, placement, recipe."""
    rows = []
    for spec in program.inputs:
        placements = ", ".join(f"{placement} over {dim}" for dim, placement in spec.placements) or "replicated"
        dtype = str(spec.dtype).removeprefix("torch.")
        recipe = spec.recipe.kind if spec.recipe.scale == 1.0 else f"{spec.recipe.kind} × {spec.recipe.scale:.3g}"
        rows.append((f"{spec.name}: {dtype}{list(spec.shape)}", placements, f"({recipe})"))
    return columns(rows)


def columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return rows as lines whose columns stand below each other, two blanks apart.

    Args:
        right: numbers of the columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _line(node: fx.Node, constants: Mapping[str, Any]) -> str:
    if node.op == "placeholder":
        return f"{node.name}{_spec(node.meta.get('val'))} = input"
    if node.op == "output":
        return f"return {_value(node.args[0], constants)}"
    name = qualified_name(node.target) if node.op == "call_function" else str(node.target)
    short = name.split("::")[-1]
    if short == "getitem":
        return f"{node.name}{_spec(node.meta.get('val'))} = {_value(node.args[0], constants)}[{node.args[1]}]"
    arguments = [_value(a, constants) for a in node.args]
    arguments += [f"{k}={_value(v, constants)}" for k, v in node.kwargs.items()]
    return f"{node.name}{_spec(node.meta.get('val'))} = {short}({', '.join(arguments)})"


def _spec(val: Any) -> str:
    if isinstance(val, TensorSpec):
        return f": {list(val.shape)}"
    return ""


def _value(value: Any, constants: Mapping[str, Any]) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, RankConstant):
        return repr(constant_value(value, constants))
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_value(v, constants) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_value(v, constants)}" for k, v in value.items()) + "}"
    return repr(value).removeprefix("torch.")
