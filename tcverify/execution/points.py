"""Why two programs differ in the exact domain although float64 cannot tell them apart.

The exact domain knows the field's laws and nothing of the functions that no field has: it hashes their arguments. So a rewrite
that relies on a law of such a function (exp(a + b) = exp(a) · exp(b)) differs there although it is right. What tells it from a
defect too small for float64: the rewrite calls the function at other points, the defect at the same points, as far as float64
can see, with other residues.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tcverify.arithmetic import Exact, Trace, TracedReals
from tcverify.errors import UnsupportedOp
from tcverify.execution.lockstep import Lockstep
from tcverify.program import Program

#: Points are the same, as far as float64 can see, up to this share of the largest argument of the function.
SAME_POINT = 1e-9

#: Literals so many units in the last place apart may come from another order of computing them.
MAX_ULPS = 4


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why two programs differ in the exact domain.

    Attributes:
        kind: "defect" (they are different functions), "literal" (they differ in literals a few ulps apart alone) or "aside" (the
            rewrite may rely on a law that the exact domain does not know).
        text: one sentence.
    """

    kind: str
    text: str = ""


def explain(original: Program, rewritten: Program, draw: int) -> Explanation:
    """Say why two programs that float64 does not tell apart differ in a draw of the exact domain. Both run in lockstep."""
    literals = _literals_nearby(original, rewritten)
    if literals and _agree(original, rewritten, draw, literals):
        new, old = next(iter(literals.items()))
        return Explanation("literal", f"{new!r} stands where the original has {old!r}; nothing else differs")
    before, after = _points(original, draw), _points(rewritten, draw)
    if before is None or after is None:
        return Explanation("aside", "the points at which functions are called cannot be followed")
    for function in sorted(before.keys() | after.keys()):
        old_points, new_points = before.get(function, _NONE), after.get(function, _NONE)
        for here, there, words in (
            (new_points, old_points, "is called at points where the original does not call it"),
            (old_points, new_points, "is no longer called at points where the original calls it"),
        ):
            if not _covered(here, there):
                return Explanation(
                    "aside", f"{function.split()[0]} {words}, and may obey a law that the field does not know"
                )
    return Explanation("defect")


# ----------------------------------------------------------------------------------------------------------- literals


def _agree(original: Program, rewritten: Program, draw: int, literals: dict[float, float]) -> bool:
    comparison = Lockstep().compare_runs(
        Lockstep().run(original, domain=Exact(draw)), Lockstep().run(rewritten, domain=Exact(draw, None, literals))
    )
    return comparison.rewritten.finished and not any(d.difference or d.problem for d in comparison.deltas)


def _literals_nearby(original: Program, rewritten: Program) -> dict[float, float]:
    """Literals of the rewritten program that the original does not have, and the original's a few ulps away.

    An eps is none: it is the user's own number, which no rewrite computes anew.
    """
    old = {value for graph in original.graphs for value, is_eps in _literals(graph) if not is_eps}
    new = {value for graph in rewritten.graphs for value, is_eps in _literals(graph) if not is_eps}
    as_eps = {value for graph in rewritten.graphs for value, is_eps in _literals(graph) if is_eps}
    found = {}
    for value in new - old - as_eps:
        near = min(old, key=lambda other, value=value: abs(other - value), default=None)  # type: ignore[misc]
        if near is not None and abs(near - value) <= MAX_ULPS * math.ulp(near):
            found[value] = near
    return found


def _literals(graph: fx.Graph) -> Iterator[tuple[float, bool]]:
    """Float literals of a graph, each with whether it is an eps by the name of its argument."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        for position, argument in enumerate(node.args):
            name = names[position] if position < len(names) else ""
            yield from ((value, name == "eps") for value in _floats(argument))
        for name, argument in node.kwargs.items():
            yield from ((value, name == "eps") for value in _floats(argument))


def _floats(argument: Any) -> Iterator[float]:
    if isinstance(argument, float) and math.isfinite(argument):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for inner in argument:
            yield from _floats(inner)


# ------------------------------------------------------------------------------------------------------------- points

#: Arguments of one function: in the reals, sorted, and as residues.
Points = tuple[torch.Tensor, torch.Tensor]
_NONE: Points = (torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.float64))


def _points(program: Program, draw: int) -> dict[str, Points] | None:
    """All points at which a program calls functions, on all ranks; None where field and reals do not take the same steps."""
    in_field, in_reals = Trace(), Trace()
    try:
        Lockstep().run(program, domain=Exact(draw, in_field))
        Lockstep().run(program, domain=TracedReals(in_reals))
    except UnsupportedOp:
        return None
    if [(f, x.shape) for f, x in in_field.calls] != [(f, x.shape) for f, x in in_reals.calls]:
        return None
    pieces: dict[str, list[Points]] = defaultdict(list)
    for (function, residues), (_, reals) in zip(in_field.calls, in_reals.calls, strict=True):
        finite = reals.isfinite() & residues.isfinite()
        pieces[function].append((reals[finite], residues[finite]))
    found = {}
    for function, points in pieces.items():
        both = torch.stack([torch.cat([p[i] for p in points]) for i in range(2)], 1).unique(dim=0)
        found[function] = both[:, 0].contiguous(), both[:, 1].contiguous()
    return found


def _covered(here: Points, there: Points) -> bool:
    """Whether every point of `here` is one of `there`: by its residue, or, as far as float64 can see, by its real number."""
    (reals, residues), (others, other_residues) = here, there
    if not reals.numel():
        return True
    if not others.numel():
        return False
    tolerance = SAME_POINT * max(float(reals.abs().max()), float(others.abs().max()))
    after = torch.searchsorted(others, reals)
    near = torch.minimum(
        (others[after.clamp(max=others.numel() - 1)] - reals).abs(), (others[(after - 1).clamp(min=0)] - reals).abs()
    )
    return bool(((near <= tolerance) | torch.isin(residues, other_residues)).all())


__all__ = ["Explanation", "explain"]
