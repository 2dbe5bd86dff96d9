"""The finding that is being shrunk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tcverify.ops import TensorSpec
from tcverify.program import Program
from tcverify.verification.verifier import Verdict


@dataclass
class Target:
    """A finding and the smallest program so far that shows it.

    Attributes:
        kind: of the finding; a trial succeeds when it shows this kind.
        deep: whether it takes a deep application to see it (see `verify`).
        size_drawn: compute nodes of the program as it was drawn.
        best: the verdict on the smallest program.
        real_shapes: of inputs and nodes as they were given, by name, where the program runs on small sizes instead.
        cut: whether shrinking ended before everything had been tried.
    """

    kind: str
    deep: bool
    size_drawn: int
    best: Verdict
    cut: bool = False
    real_shapes: Mapping[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        scaled = self.best.pair.scaled
        self.real_shapes = _shapes(scaled.real) if scaled is not None else {}

    def record(self, verdict: Verdict) -> bool:
        """Take note of a trial, of a smaller program each time; return whether it shows the finding."""
        shows = any(f.kind == self.kind for f in verdict.findings)
        if shows:
            self.best = verdict
        return shows


def _shapes(program: Program) -> dict[str, tuple[int, ...]]:
    vals = {node.name: node.meta.get("val") for graph in program.graphs for node in graph.nodes}
    found = {name: val.shape for name, val in vals.items() if isinstance(val, TensorSpec)}
    return found | {spec.name: spec.shape for spec in program.inputs}
