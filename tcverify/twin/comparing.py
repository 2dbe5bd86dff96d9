"""Compares what a pass made of a program with what it made of the twin: both are to be the same, up to sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from tcverify.ops import qualified_name
from tcverify.program.graph import same_structure


@dataclass(frozen=True, slots=True)
class Contrast:
    """How a rewrite of a program differs from that of its twin.

    Attributes:
        more, fewer: ops that the program's rewrite has more, or fewer of, with how many.
    """

    more: Mapping[str, int]
    fewer: Mapping[str, int]

    def __str__(self) -> str:
        parts = [f"{number} {op} more" for op, number in self.more.items()]
        parts += [f"{number} {op} fewer" for op, number in self.fewer.items()]
        return ", ".join(parts) or "the same ops in another order, or on other operands"


def contrast(real: Sequence[fx.Graph], small: Sequence[fx.Graph]) -> Contrast | None:
    """How the rewritten graphs of a program differ from those of its twin; None where only sizes do."""
    if len(real) == len(small) and all(same_structure(a, b, integers=False) for a, b in zip(real, small, strict=True)):
        return None
    counts: Counter[str] = Counter()
    for graphs, sign in ((real, 1), (small, -1)):
        for graph in graphs:
            for node in graph.nodes:
                if node.op == "call_function":
                    counts[qualified_name(node.target)] += sign
    return Contrast({op: n for op, n in counts.items() if n > 0}, {op: -n for op, n in counts.items() if n < 0})


__all__ = ["Contrast", "contrast"]
