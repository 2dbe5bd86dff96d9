"""A program that is part forward and part backward, as code: an autograd function, whose backward is the second part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tcverify.errors import Unsupported
from tcverify.program import Program
from tcverify.pytorch.cutting import find_cut
from tcverify.pytorch.end_to_end.code import Line, RankCode


def differentiated_text(program: Program, rank: int, code: RankCode, share: float) -> str:
    """The autograd function `Step_RANK`, and `step_RANK`, which runs its forward and its backward.

    What the backward returns arrives as the gradient of inputs that stand for nothing else, and what it is given as that of
    outputs that stand for nothing else.

    Args:
        share: of the program that is forward, about.

    Raises:
        Unsupported: a value cannot be a gradient.
    """
    graph = program.graph(rank)
    nodes = [node for node in graph.nodes if node.op != "output"]
    names = dict(zip(nodes, [*code.parameters, *(line.name for line in code.lines)], strict=True))
    results = pytree.tree_leaves(fx.node.map_aggregate(graph.output_node().args[0], lambda x: x))
    cut = find_cut(graph, results, share)
    behind = [one for one in dict.fromkeys(results) if one in cut.backward or one in cut.tangents]
    ahead = [names[one] for one in dict.fromkeys(results) if one not in behind]
    tangents = [node for node in nodes if node in cut.tangents]
    for one in (*behind, *tangents):
        value = one.meta["val"]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise Unsupported(f"'{one.name}' is no floating-point tensor, so that it cannot be a gradient")
    first = [line for line, node in _lines(code, nodes) if node not in cut.backward]
    second = [line for line, node in _lines(code, nodes) if node in cut.backward]
    read = {name for line in second for name in line.reads}
    given = [node for node in nodes if node not in cut.backward and node not in cut.tangents]
    saved = [names[node] for node in given if names[node] in read]
    primals = [names[node] for node in given if node.op == "placeholder"]
    slots = [f"slot_{number}" for number in range(len(behind))]
    places = [f"for_{names[node]}" for node in tangents]
    returned, arriving = [names[one] for one in behind], [names[one] for one in tangents]
    lines = [
        f"class Step_{rank}(torch.autograd.Function):",
        "    @staticmethod",
        f"    def forward({', '.join(['ctx', *slots, *places, *primals])}):",
        *(f"        {line}" for line in first),
        f"        ctx.save_for_backward({', '.join(saved)})",
        f"        return {_tuple([*ahead, *(f'{place}.clone()' for place in places)])}",
        "",
        "    @staticmethod",
        f"    def backward({', '.join(['ctx', *(f'_{n}' for n in range(len(ahead))), *arriving])}):",
        *([f"        {_tuple(saved)} = ctx.saved_tensors"] if saved else []),
        *(f"        {line}" for line in second),
        f"        return {_tuple([*returned, *['None'] * (len(places) + len(primals))])}",
        "",
        "",
        f"def step_{rank}({', '.join([*code.parameters, f'apply=Step_{rank}.apply'])}):",
        '    """The forward, and the backward behind it, whose results are the gradients of the slots."""',
        *(f"    {slot} = {_zeros(one)}" for slot, one in zip(slots, behind, strict=True)),
        *(f"    {place} = {_zeros(one)}" for place, one in zip(places, tangents, strict=True)),
        f"    {_tuple([*ahead, *places])} = apply({', '.join([*slots, *places, *primals])})",
        f"    torch.autograd.backward([{', '.join(places)}], [{', '.join(arriving)}])",
        *(f"    {name} = {slot}.grad" for name, slot in zip(returned, slots, strict=True)),
        f"    return {code.result}",
    ]
    return "\n".join(lines)


def _lines(code: RankCode, nodes: Sequence[fx.Node]) -> list[tuple[Line, fx.Node]]:
    return list(zip(code.lines, (node for node in nodes if node.op == "call_function"), strict=True))


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _zeros(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"torch.zeros({list(value.shape)}, dtype={value.dtype}, requires_grad=True)"


__all__ = ["differentiated_text"]
