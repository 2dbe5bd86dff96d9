"""Why two programs differ in the exact domain although float64 cannot tell them apart.

The exact domain knows the field's laws and nothing of the functions that no field has: it hashes their arguments. So a rewrite
that relies on a law of such a function (exp(a + b) = exp(a) · exp(b)) differs there although it is right. What tells it from a
defect too small for float64: the rewrite calls the function at other points, the defect at the same points, as far as float64
can see, with other residues.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from tcverify.arithmetic import Exact, Trace, TracedReals
from tcverify.errors import UnsupportedOp
from tcverify.execution.literals import rounded_literals
from tcverify.execution.lockstep import Lockstep
from tcverify.program import Program

#: Points are the same, as far as float64 can see, up to this share of the largest argument of the function.
SAME_POINT = 1e-9


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why two programs differ in the exact domain.

    Attributes:
        kind: "defect" (they are different functions), "literal" (they differ in the rounding of literals alone) or "aside" (the
            rewrite may rely on a law that the exact domain does not know).
        text: one sentence.
    """

    kind: str
    text: str = ""


def explain(original: Program, rewritten: Program, draw: int) -> Explanation:
    """Say why two programs that float64 does not tell apart differ in a draw of the exact domain. Both run in lockstep."""
    rounded = rounded_literals(original, rewritten)
    if rounded and _agree(original, rewritten, draw, {r.value: r.residue for r in rounded}):
        told = ", ".join(f"{r.value!r} stands for {r.expression}" for r in rounded[:3])
        return Explanation("literal", f"{told}; nothing else differs")
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


def _agree(original: Program, rewritten: Program, draw: int, literals: dict[float, float]) -> bool:
    """Whether the versions agree once literals are read as residues that are given."""
    before = Lockstep().run(original, domain=Exact(draw))
    comparison = Lockstep().compare_runs(before, Lockstep().run(rewritten, domain=Exact(draw, None, literals)))
    return comparison.rewritten.finished and not any(d.difference or d.problem for d in comparison.deltas)


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
