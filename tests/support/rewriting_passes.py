"""Passes that rewrite `neg` one by one: soundly, or with a planted defect at some places."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

import tcverify
from tcverify import PARTIAL, GraphBuilder, InputSpec, Mesh, Program, spmd_program

ATEN = torch.ops.aten


def negations(number: int, *, joined: bool = False) -> Program:
    """So many negations of a reduced value, each returned; or `joined`, the larger of the first two in place of those."""

    def build(b: GraphBuilder) -> object:
        reduced = b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp"))
        found = [b.call("aten::neg", reduced) for _ in range(number)]
        return (b.call("aten::maximum", *found[:2]), *found[2:]) if joined else tuple(found)

    x = InputSpec("x", (4, 8), placements=(("tp", PARTIAL),))
    return spmd_program(Mesh.grid({"tp": 2}), [x], build, seed=1)


def _rewrite(gm: fx.GraphModule, wrong: Iterable[int], *, asking: bool) -> None:
    """Write every negation as a product; at the places that are `wrong`, of the wrong number."""
    places = [node for node in gm.graph.nodes if node.target is ATEN.neg.default]
    for place, node in enumerate(places):
        if asking and not tcverify.rewrite("product", node):
            continue
        with gm.graph.inserting_before(node):
            made = gm.graph.call_function(ATEN.mul.Tensor, (node.args[0], -1.0))
            made.meta["val"] = node.meta["val"]
            if place in wrong:
                made = gm.graph.call_function(ATEN.sub.Tensor, (made, 3.0))
                made.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)


def sound(gm: fx.GraphModule) -> None:
    """Every rewrite is right."""
    _rewrite(gm, (), asking=True)


def third(gm: fx.GraphModule) -> None:
    """The third one is wrong; the pass asks."""
    _rewrite(gm, (2,), asking=True)


def silent_third(gm: fx.GraphModule) -> None:
    """The third one is wrong; the pass does not ask."""
    _rewrite(gm, (2,), asking=False)


def first_and_third(gm: fx.GraphModule) -> None:
    """Two are wrong, each alone."""
    _rewrite(gm, (0, 2), asking=True)


def pair(gm: fx.GraphModule) -> None:
    """The first two are wrong; where only the larger one is read, that shows only in both."""
    _rewrite(gm, (0, 1), asking=True)


def silent_pair(gm: fx.GraphModule) -> None:
    """As `pair`, without asking."""
    _rewrite(gm, (0, 1), asking=False)


def raising(gm: fx.GraphModule) -> None:
    """The second rewrite raises."""
    for place, node in enumerate([node for node in gm.graph.nodes if node.target is ATEN.neg.default]):
        if tcverify.rewrite("product", node) and place == 1:
            raise ValueError("the second one")


def outside(gm: fx.GraphModule) -> None:
    """It asks, but what is wrong it does anyway."""
    for node in gm.graph.nodes:
        if node.target is ATEN.neg.default:
            tcverify.rewrite("nothing", node)
            node.target = ATEN.abs.default


def by_replace_pattern(gm: fx.GraphModule) -> None:
    """Made of a pattern of FX; wrong everywhere."""

    def pattern(x: torch.Tensor) -> torch.Tensor:
        return ATEN.neg.default(x)  # type: ignore[no-any-return]

    def replacement(x: torch.Tensor) -> torch.Tensor:
        return ATEN.abs.default(x)  # type: ignore[no-any-return]

    fx.replace_pattern(gm, pattern, replacement)


def by_inductor_pattern(gm: fx.GraphModule) -> None:
    """Made of a pattern of Inductor; wrong everywhere."""
    from torch._inductor.pattern_matcher import (
        CallFunction,
        KeywordArg,
        Match,
        PatternMatcherPass,
        register_graph_pattern,
    )

    patterns = PatternMatcherPass()

    def absolute(match: Match, x: fx.Node) -> None:
        node = match.output_node()
        with match.graph.inserting_before(node):
            made = match.graph.call_function(ATEN.abs.default, (x,))
        made.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(made)
        match.erase_nodes()

    register_graph_pattern(CallFunction(ATEN.neg.default, KeywordArg("x")), pass_dict=patterns)(absolute)
    patterns.apply(gm.graph)


def rarely(gm: fx.GraphModule) -> None:
    """Rewrites where there are three."""
    if sum(node.target is ATEN.neg.default for node in gm.graph.nodes) == 3:
        _rewrite(gm, (), asking=False)  # rarely reached
