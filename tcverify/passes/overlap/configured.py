"""A list of passes, run one after the other as one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from torch import fx

from tcverify.errors import UsageError
from tcverify.passes.base import Pass
from tcverify.program import CollectiveStatistics, Contract
from tcverify.registry.passes import OVERLAP_PASSES

#: A pass of the list: a known name, or anything that takes a graph module and returns it, another one, or None.
Stage = str | Callable[[fx.GraphModule], Any]

#: The default list.
USUAL = "reorder_compute_for_overlap,sink_waits,raise_comms"


class ReorderForComputeCommOverlap(Pass):
    """Runs passes one after the other, each on the result of the previous one.

    Args:
        passes: names of `OVERLAP_PASSES`, separated by commas, or a list of names and callables. A callable takes the graph
            module and changes it in place, or returns another one; so does an instance of a pass, which has its own options.
        options: those of `Pass`.

    Raises:
        UsageError: a name is not known, or something is neither a name nor callable.

    Attributes:
        statistics: the reports of the passes on each collective, in order.
        stages: the passes that are run. `rewrites` counts for each what it rewrote, by its name.
    """

    name = "reorder_for_compute_comm_overlap"
    contract: ClassVar[Contract] = Contract(metadata=True, order=True, collective_order=True)

    def __init__(self, *, passes: str | Sequence[Stage] = USUAL, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(passes, Iterable):
            raise UsageError(f"option passes of pass '{self.name}' cannot be {passes!r}", "give names and callables")
        given = [name.strip() for name in passes.split(",")] if isinstance(passes, str) else list(passes)
        self.stages = [self._stage(item) for item in given if item != ""]
        self.statistics: tuple[CollectiveStatistics, ...] = ()
        contracts = [getattr(stage, "contract", Contract()) for stage in self.stages]
        budgets = [each.memory_budget for each in contracts]
        self.contract = Contract(  # type: ignore[misc] # of this instance: what all of them keep
            identity=all(each.identity for each in contracts),
            metadata=_weakest([each.metadata for each in contracts]),
            overlap=all(each.overlap for each in contracts),
            order=all(each.order for each in contracts),
            collective_order=all(each.collective_order for each in contracts),
            memory_budget=None if None in budgets else math.prod(1 + (budget or 0) for budget in budgets) - 1,
        )

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Run the passes. See `Pass.rewrite`."""
        gm = graph.owning_module
        if gm is None:
            raise UsageError(f"pass '{self.name}' is given a graph that no module owns", "give it a GraphModule")
        self.statistics = ()
        given = _written(gm.graph)
        for stage in self.stages:
            name = str(getattr(stage, "name", None) or getattr(stage, "__name__", type(stage).__name__))
            before = _written(gm.graph)
            returned = stage(gm)
            if isinstance(returned, fx.GraphModule) and returned is not gm:
                gm.graph = returned.graph
            self.statistics += tuple(getattr(stage, "statistics", ()))
            counts = stage.rewrites.values() if isinstance(stage, Pass) else [_written(gm.graph) != before]
            self.rewrites[name] = self.rewrites.get(name, 0) + sum(counts)
        if _written(gm.graph) == given:  # the stages have undone what they did
            self.rewrites = dict.fromkeys(self.rewrites, 0)
        return []

    def _stage(self, item: Any) -> Callable[[fx.GraphModule], Any]:
        if isinstance(item, str):
            if item in OVERLAP_PASSES:
                return OVERLAP_PASSES[item]()  # type: ignore[no-any-return]
            names = ", ".join(OVERLAP_PASSES)
            raise UsageError(f"option passes of pass '{self.name}' names no pass '{item}'", f"known are {names}")
        if isinstance(item, type) and issubclass(item, Pass):
            return item()
        if callable(item):
            return item  # type: ignore[no-any-return]
        raise UsageError(
            f"option passes of pass '{self.name}' cannot hold {str(item)[:60]!r}", "give names and callables"
        )


def _written(graph: fx.Graph) -> list[Any]:
    """A snapshot of a graph to detect changes: its nodes in order with their targets."""
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


def _weakest(promises: Sequence[bool | None]) -> bool | None:
    """What all given passes promise about metadata."""
    return next((weak for weak in (False, None) if weak in promises), True)


__all__ = ["USUAL", "ReorderForComputeCommOverlap", "Stage"]
