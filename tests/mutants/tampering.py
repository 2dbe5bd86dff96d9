"""One wrong node in a graph that was right: by chance, without regard to what any pass does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from torch import fx

from tcverify.ops import resolve
from tcverify.passes.editing import op_name
from tcverify.program import Program

#: Ops that take each other's place: equal signatures, other results.
SWAPPED = {
    "aten::add.Tensor": "aten::sub.Tensor",
    "aten::sub.Tensor": "aten::add.Tensor",
    "aten::mul.Tensor": "aten::add.Tensor",
    "aten::silu": "aten::tanh",
    "aten::tanh": "aten::silu",
}

#: Changes a node of every rank's graph; returns the names of those that are wrong now, none where it does not apply.
Tamper = Callable[[fx.Graph, fx.Node, random.Random], set[str]]


def _spec(node: Any) -> tuple[Any, ...] | None:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    if isinstance(val, (tuple, list)) or val is None or not hasattr(val, "shape"):
        return None
    return tuple(val.shape), val.dtype


def other_operand(graph: fx.Graph, node: fx.Node, rng: random.Random) -> set[str]:
    """An operand is another value of its shape."""
    operands = [o for o in node.all_input_nodes if _spec(o) is not None]
    if not operands:
        return set()
    operand = rng.choice(operands)
    earlier = []
    for candidate in graph.nodes:
        if candidate is node:
            break
        if candidate is not operand and _spec(candidate) == _spec(operand):
            earlier.append(candidate)
    if not earlier:
        return set()
    node.replace_input_with(operand, rng.choice(earlier))
    return {node.name}


def left_out(graph: fx.Graph, node: fx.Node, rng: random.Random) -> set[str]:
    """A node is left out: its readers read what it reads."""
    operand = next((o for o in node.all_input_nodes if _spec(o) == _spec(node) is not None), None)
    if operand is None or not node.users:
        return set()
    readers = {node.name, *(user.name for user in node.users if user.op != "output")}
    if any(user.op == "output" for user in node.users):
        readers.add(operand.name)
    node.replace_all_uses_with(operand)
    graph.erase_node(node)
    return readers


def doubled(graph: fx.Graph, node: fx.Node, rng: random.Random) -> set[str]:
    """A result is doubled."""
    spec = _spec(node)
    if spec is None or not spec[1].is_floating_point or not node.users:
        return set()
    with graph.inserting_after(node):
        made = graph.create_node("call_function", resolve("aten::mul.Tensor"), (node, 2.0), name="twice")
    made.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return {made.name}


def other_number(graph: fx.Graph, node: fx.Node, rng: random.Random) -> set[str]:
    """A number among the arguments is another one: eps, a dim, a bound of a slice, a scale."""
    numbers = [i for i, a in enumerate(node.args) if isinstance(a, (int, float)) and not isinstance(a, bool)]
    numbers = [i for i in numbers if not _is_rank(node, i)]
    if not numbers:
        return set()
    i = rng.choice(numbers)
    value = node.args[i]
    node.update_arg(i, value * 10 if isinstance(value, float) else value + rng.choice((-1, 1)))
    return {node.name}


def _is_rank(node: fx.Node, index: int) -> bool:
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    return index < len(arguments) and "rank" in arguments[index].name


def other_op(graph: fx.Graph, node: fx.Node, rng: random.Random) -> set[str]:
    """Another op stands in its place."""
    other = SWAPPED.get(op_name(node))
    if other is None:
        return set()
    node.target = resolve(other)
    return {node.name}


def other_order(graph: fx.Graph, node: fx.Node, rng: random.Random) -> set[str]:
    """A group is in another order."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    for i, argument in enumerate(arguments):
        if argument.name == "rank_group" and i < len(node.args) and len(node.args[i]) > 1:
            node.update_arg(i, list(node.args[i])[::-1])
            return {node.name}
    return set()


TAMPERS: dict[str, Tamper] = {
    f.__name__: f for f in (other_operand, left_out, doubled, other_number, other_op, other_order)
}


def tampered(
    program: Program, kind: str, seed: int, rank: int | None = None
) -> tuple[Program, dict[int, set[str]]] | None:
    """Return the program with one wrong node, and by rank the names of the nodes that are wrong; None where none was changed.

    Args:
        rank: whose graph is changed; None changes all.
    """
    graphs = [program.graph(r) for r in range(program.mesh.world_size)]
    wrong: dict[int, set[str]] = {}
    choices = [n.name for n in graphs[0].nodes if n.op == "call_function"]
    if not choices:
        return None
    chosen = random.Random(seed).choice(choices)
    for r, graph in enumerate(graphs):
        node = next((n for n in graph.nodes if n.name == chosen), None)
        if node is not None and rank in (None, r):
            names = TAMPERS[kind](graph, node, random.Random(seed))
            if names:
                wrong[r] = names
    return (program.with_graphs(graphs), wrong) if wrong else None
