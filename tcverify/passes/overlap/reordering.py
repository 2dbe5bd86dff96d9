"""The greedy passes: waits sink, communication rises, compute goes where it covers communication.

Each keeps every edge of `comm_graph` and gives no promise about memory or time: what is moved ahead of a wait lives longer, and
an order that starts one collective earlier may start another one later. Graphs that are lowered to streams are left unchanged,
with a line in the log, since adjacency has a meaning there.
"""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import fx

from tcverify.cost import DeviceProfile
from tcverify.cost import load_device_profile as device_profile
from tcverify.ops import RECORD, WAIT, lookup
from tcverify.passes.base import Pass
from tcverify.passes.editing import declared_after
from tcverify.passes.overlap.graph import CommGraph, GraphReading, comm_graph, put_in_order
from tcverify.passes.overlap.list_schedule import Key, first_needed_by, list_schedule, overlap_schedule
from tcverify.passes.overlap.runtimes import Gather, Runtimes, agree_on_runtimes, runtimes
from tcverify.program import Contract

log = logging.getLogger(__name__)


class OverlapPass(Pass):
    """A pass that puts the nodes of a graph with asynchronous collectives into another order. Subclasses write `reordered`.

    Args:
        unsafe_collectives_reorder: let asynchronous collectives change places among each other. UNSAFE, and off unless asked
            for: ranks may then start collectives in different orders, which hangs them or mixes up their data. The contract
            does not promise the order of collectives then.
        options: those of `Pass`.
    """

    contract: ClassVar[Contract] = Contract(metadata=True, order=True, collective_order=True)
    PATTERNS = ("moved",)
    reading: ClassVar[type[GraphReading]] = GraphReading

    def __init__(self, *, unsafe_collectives_reorder: bool | str = False, **options: Any) -> None:
        super().__init__(**options)
        self.unsafe = self._boolean("unsafe_collectives_reorder", unsafe_collectives_reorder)
        if self.unsafe:
            self.contract = replace(self.contract, collective_order=False)  # type: ignore[misc] # of this instance

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Put the nodes into their new order. See `Pass.rewrite`."""
        if is_lowered(graph):
            log.info("%s leaves a graph alone: it is lowered to streams", self.name)
            return []
        found = self.read(graph)
        if found.starts:
            self.rewrites["moved"] = put_in_order(graph, self.reordered(found))
        return []

    def read(self, graph: fx.Graph) -> CommGraph:
        """The dependencies that the new order keeps."""
        return comm_graph(graph, unsafe_collectives_reorder=self.unsafe, reading=self.reading)

    @abstractmethod
    def reordered(self, found: CommGraph) -> Sequence[fx.Node]:
        """Return all nodes in their new order. Called for graphs with asynchronous collectives only."""


def is_lowered(graph: fx.Graph) -> bool:
    """Whether a graph is lowered to streams already."""
    return any(node.op == "call_function" and lookup(node.target).name in (WAIT, RECORD) for node in graph.nodes)


class SinkWaits(OverlapPass):
    """Every wait as late as possible: nodes that do not need it go first. All others keep their order if they can."""

    name = "sink_waits"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, order=True, collective_order=True)

    def reordered(self, found: CommGraph) -> Sequence[fx.Node]:
        place = {node: number for number, node in enumerate(found.nodes)}

        def key(node: fx.Node) -> Key:
            return int(found.kind(node) == "wait"), place[node]

        return list_schedule(found, key)


class RaiseComms(OverlapPass):
    """Every start as early as possible: its operands go first, then those of the next one, and so on."""

    name = "raise_comms"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, order=True, collective_order=True)

    def reordered(self, found: CommGraph) -> Sequence[fx.Node]:
        needed = first_needed_by(found)
        place = {node: number for number, node in enumerate(found.nodes)}

        def key(node: fx.Node) -> Key:
            return needed[node], place[node]

        return list_schedule(found, key)


class ReorderComputeForOverlap(OverlapPass):
    """Every start is followed by as much independent compute as its communication takes, where there is so much.

    See `overlap_schedule`. Where a node has no cost and no device is known, structure alone decides: a collective counts as
    covered by one matrix product.

    Args:
        device: name of a device profile, or the path of one in TOML, for nodes without a cost of their own; the one that the
            program names unless given.
        align_runtimes: decide by the median over ranks of the time of every node, as `runtimes.aligned` finds it: all ranks must
            then run the pass together.
        options: those of `OverlapPass`.

    Attributes:
        gather: how the times of all ranks are found; None for torch.distributed.
    """

    name = "reorder_compute_for_overlap"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, order=True, collective_order=True)

    def __init__(self, *, device: str | None = None, align_runtimes: bool | str = False, **options: Any) -> None:
        super().__init__(**options)
        self.profile: DeviceProfile | None = None if device is None else device_profile(device)
        self.align = self._boolean("align_runtimes", align_runtimes)
        self.gather: Gather | None = None

    def reordered(self, found: CommGraph) -> Sequence[fx.Node]:
        return overlap_schedule(found, self.times(found))

    def times(self, found: CommGraph) -> Runtimes | None:
        """Seconds per node, None where they are not known."""
        return agree_on_runtimes(found, runtimes(found, self.profile), align=self.align, gather=self.gather)


class DecideGlobalOrderingOfComms(Pass):
    """Declares the order in which all communication stands: each start and effect names the one before it in `meta["after"]`.

    Passes that come later keep it, whatever they know of groups. No node moves.
    """

    name = "decide_global_ordering_of_comms"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, order=True, collective_order=True)
    PATTERNS = ("declared",)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Write `meta["after"]`. See `Pass.rewrite`."""
        found = comm_graph(graph)
        chain = [node for node in found.nodes if found.kind(node) in ("start", "effect")]
        for earlier, later in itertools.pairwise(chain):
            declared = declared_after(later)
            if earlier.name not in declared:
                later.meta["after"] = [*declared, earlier.name]
                self.rewrites["declared"] += 1
        return []


__all__ = [
    "DecideGlobalOrderingOfComms",
    "OverlapPass",
    "RaiseComms",
    "ReorderComputeForOverlap",
    "SinkWaits",
    "is_lowered",
]
