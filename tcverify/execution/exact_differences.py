"""Why two programs differ in the exact domain although float64 cannot tell them apart.

The exact domain knows the laws of fields and nothing of the functions that no field has: it hashes their arguments. So a rewrite
that relies on a law of such a function (exp(a + b) = exp(a) · exp(b)) differs there although it is right. What tells it from a
defect too small for float64: both versions run once more in float64, with other functions in the place of exp, sqrt, … and
another order in the place of that of numbers. There the law does not hold, and the difference is as large as the values; that
of a small defect stays small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from tcverify.domains import ORDER, Exact, ScrambledReals
from tcverify.errors import UnsupportedOp
from tcverify.execution.exact_literals import new_constant, rounded_literals
from tcverify.execution.lockstep.lockstep import Lockstep
from tcverify.program import Program

#: Versions differ by more than a small defect does above this many times what rounding does …
ROUNDING = 1e4
#: … and this share of the largest value.
SHARE = 1e-11
#: Above this share, a law that does not hold may go unnoticed.
VISIBLE = 1e-3
#: Of so few elements each may be chosen by chance as in the order of numbers: other orders make up for those that lack …
ELEMENTS = 32
#: … up to this many.
ORDERS = 16


#: Kinds of explanations; see `Explanation`.
ExplanationKind: TypeAlias = Literal["defect", "literal", "aside"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why two programs differ in the exact domain.

    Attributes:
        kind: "defect" (they are different functions), "literal" (they differ in the rounding of literals alone) or "aside" (the
            rewrite may rely on a law that the exact domain does not know).
        text: one sentence.
    """

    kind: ExplanationKind
    text: str = ""


def explain(original: Program, rewritten: Program, draw: int) -> Explanation:
    """Say why two programs that float64 does not tell apart differ in a draw of the exact domain. Both run in lockstep."""
    for rounded in rounded_literals(original, rewritten, _read(original, draw), _read(rewritten, draw)):
        if _agree(original, rewritten, draw, {r.value: r.residue for r in rounded}):
            told = ", ".join(f"{r.value!r} stands for {r.expression}" for r in rounded[:3])
            return Explanation("literal", f"{told}; nothing else differs")
    constant = new_constant(original, rewritten)
    if constant is not None:
        return Explanation("aside", f"'{constant}' holds numbers that the original does not have, rounded or wrong")
    called: set[str] = set()
    differ = _differ_in(original, rewritten, None, called)
    if not called:
        return Explanation("defect")  # of sums, products and quotients the field knows every law
    if differ is None:
        return Explanation(
            "aside", "it cannot be told whether the rewrite relies on a law that the field does not have"
        )
    if not differ:
        return _of_order(original, rewritten) if ORDER in called else Explanation("defect")
    for name in sorted(called):
        if _differ_in(original, rewritten, name, set()):
            return Explanation(
                "aside", f"the rewrite relies on a law of {_strip_parameters(name)}, which the field does not have"
            )
    names = ", ".join(sorted({_strip_parameters(name) for name in called}))
    return Explanation("aside", f"the rewrite relies on laws of {names}, which the field does not have")


def _of_order(original: Program, rewritten: Program) -> Explanation:
    """Look for a law of the order of numbers in further orders, where outputs are small."""
    outputs = [
        value for rank in Lockstep().run(original).ranks for value in rank.outputs if isinstance(value, torch.Tensor)
    ]
    fewest = min((value.numel() for value in outputs if value.numel()), default=ELEMENTS)
    for order in range(1, min(ORDERS, -(-ELEMENTS // fewest))):
        if _differ_in(original, rewritten, ORDER, set(), order):
            return Explanation("aside", f"the rewrite relies on a law of {ORDER}, which the field does not have")
    return Explanation("defect")


def _strip_parameters(name: str) -> str:
    """The name of a function without its parameters."""
    return name if name == ORDER else name.split()[0]


def _read(program: Program, draw: int) -> set[float]:
    """The floating-point literals that a program meets."""
    domain = Exact(draw)
    Lockstep().run(program, domain=domain)
    return domain.algebra.read


def _agree(original: Program, rewritten: Program, draw: int, literals: dict[float, float]) -> bool:
    """Whether the versions agree once literals are read as residues that are given."""
    domain = Exact(draw, literals)
    try:
        comparison = Lockstep().compare(original, rewritten, domain)
    except UnsupportedOp:
        return False
    finished = comparison.original.finished and comparison.rewritten.finished
    return finished and not any(d.difference or d.problem or d.overflow for d in comparison.deltas)


def _differ_in(
    original: Program, rewritten: Program, only: str | None, called: set[str], order: int = 0
) -> bool | None:
    """Whether the versions still differ by more than rounding explains if functions are replaced by others.

    Args:
        only: the only function that is replaced; None replaces all.
        called: receives the functions that the programs call.
        order: which other order replaces that of numbers.

    Returns:
        None if unknown.
    """
    domain = ScrambledReals(only, order)
    lockstep = Lockstep()
    try:
        comparison = lockstep.compare(original, rewritten, domain)
        if not (comparison.original.finished and comparison.rewritten.finished):
            return None
        noise = lockstep.probe(original, comparison.original, domain=domain)
    except UnsupportedOp:
        return None
    finally:
        called |= domain.algebra.called
    if any(math.isinf(noise.get(delta.label, 0.0)) for delta in comparison.deltas):
        return None
    scale: dict[str, float] = {}
    for delta in comparison.deltas:
        scale[delta.label] = max(scale.get(delta.label, 0.0), delta.scale)
    limits = {label: ROUNDING * noise.get(label, 0.0) + SHARE * size for label, size in scale.items()}
    if any(d.problem is not None or d.overflow or not d.difference <= limits[d.label] for d in comparison.deltas):
        return True
    return None if any(limit > VISIBLE * scale[label] for label, limit in limits.items()) else False


__all__ = ["Explanation", "explain"]
