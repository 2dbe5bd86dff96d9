"""The passes on graphs of FSDP with one defect put back in each class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from tcverify.passes.editing import named_arguments, op_name
from tcverify.passes.overlap.fsdp import COPY_IN, read_resize
from tcverify.passes.overlap.fsdp_order import EnforceCommOrderingForFsdp, FsdpBlock
from tcverify.passes.overlap.fsdp_params import Parameter, RemoveFsdp2UnshardedParamGraphInputUsage
from tcverify.passes.overlap.fsdp_reinplace import Gather, ReinplaceFsdpAllGather
from tcverify.passes.overlap.graph import GraphReading, Why
from tcverify.passes.storages import GraphAccesses


class _Reinplace(ReinplaceFsdpAllGather):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


class _Remove(RemoveFsdp2UnshardedParamGraphInputUsage):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


class _Enforce(EnforceCommOrderingForFsdp):
    """The sound pass; subclasses put a defect back and carry their own name."""

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__


# ---------------------------------------------------------------------------------------------------------- reinplacing


class GatheredIntoFirstBuffer(_Reinplace):
    """All all_gathers of one layout write into the buffer of the first one (wrong-value, async-race)."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        self.first: dict[Any, fx.Node] = {}
        return super().__call__(gm)

    def buffer_node(self, gather: Gather) -> fx.Node:
        mine = super().buffer_node(gather)
        val = mine.meta["val"]
        return self.first.setdefault((tuple(val.shape), val.dtype), mine)


class BufferTakenThoughRead(_Reinplace):
    """An all_gather writes into its buffer though others use that behind the copy-in (wrong-value, async-race)."""

    def is_alone(self, gather: Gather, users: list[fx.Node], place: dict[fx.Node, int]) -> bool:
        return all(node.op not in ("placeholder", "get_attr") for node in users)


class GatheredIntoTheSlice(_Reinplace):
    """The slice of this rank is given for the buffer: the first result of the copy-in in place of the second
    (malformed-graph, rewritten-raises, …)."""

    def buffer_node(self, gather: Gather) -> fx.Node:
        super().buffer_node(gather)
        found = named_arguments(gather.start)["input"]
        assert isinstance(found, fx.Node)
        return found


class CopiedInReverse(_Reinplace):
    """Shards are copied in the other way round than they are taken out, sizes and all (wrong-value)."""

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        displaced = super().rewrite(graph)
        for node in graph.nodes if self.rewrites["all_gather"] else ():
            if op_name(node) == COPY_IN:
                shards, buffer, sizes, *rest = node.args
                node.args = (list(shards)[::-1], buffer, list(sizes)[::-1], *rest)  # type: ignore[arg-type, call-overload]
        return displaced


# ------------------------------------------------------------------------------------------------------------- removing


class CopyBeyondItsInterval(_Remove):
    """In a layer that runs twice, all uses of a parameter get what the first copy has copied (wrong-value)."""

    def parameters(self, graph: fx.Graph, found: GraphAccesses) -> list[Parameter]:
        known = super().parameters(graph, found)
        for parameter in known:
            for interval in parameter.intervals[1:]:
                interval.source = parameter.intervals[0].source
        return known


class LastCopyForAll(_Remove):
    """Uses behind the first copy of several are given what the last one copies (pass-raised, wrong-value)."""

    def parameters(self, graph: fx.Graph, found: GraphAccesses) -> list[Parameter]:
        known = super().parameters(graph, found)
        for parameter in known:
            for interval in parameter.intervals:
                interval.source = parameter.intervals[-1].source
        return known


class OverwrittenSourceUsed(_Remove):
    """What was copied is used in place of the parameter, though it has been overwritten since (wrong-value)."""

    def objection(self, parameter: Parameter, reason: str) -> str:
        return "" if "is overwritten before its last use" in reason else reason


class KeptParameterRemoved(_Remove):
    """Nobody asks whether the caller finds in the parameter what was copied last (wrong-value, …)."""

    def objection(self, parameter: Parameter, reason: str) -> str:
        return "" if reason == "it is not freed at the end" else reason

    def unneeded(self, parameter: Parameter) -> list[fx.Node]:
        return parameter.resizes


class FirstFreeingDropped(_Remove):
    """The first freeing goes with the others, though the parameter held memory at the beginning (leak, wrong-value)."""

    def unneeded(self, parameter: Parameter) -> list[fx.Node]:
        return parameter.resizes


class ResizesOfOthersDropped(_Remove):
    """The allocations of parameters that stay go too, where they stand before a copy (use-after-free, …)."""

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        displaced = super().rewrite(graph)
        for node in list(graph.nodes):
            found = read_resize(node)
            if found is not None and found[1] != 0 and not node.users:
                graph.erase_node(node)
                self.rewrites["parameter"] += 1
        return displaced


class ViewsKeepTheParameter(_Remove):
    """Uses of the parameter are replaced, uses of its views are not: these show what nobody has copied (wrong-value, …)."""

    def parameters(self, graph: fx.Graph, found: GraphAccesses) -> list[Parameter]:
        known = super().parameters(graph, found)
        for parameter in known:
            for interval in parameter.intervals:
                interval.readers = [node for node in interval.readers if node not in parameter.interval_of]
        return known


# ------------------------------------------------------------------------------------------------------------- ordering


class DeclaredBehindItself(_Enforce):
    """The extra edges name the wrong all_gather: the earlier block is declared to follow the later one (broken-order)."""

    def declare(self, block: FsdpBlock, earlier: FsdpBlock) -> int:
        return super().declare(
            FsdpBlock(earlier.behind[:1], earlier.behind), FsdpBlock(block.before, block.before[-1:])
        )


class StartsSinkBelowWaits(_Enforce):
    """The next all_gather goes behind the wait for the last one also where it had been started before that (broken-order,
    deadlock)."""

    class reading(GraphReading):
        def follow(self, node: fx.Node, earlier: Iterable[fx.Node], why: Why) -> None:
            if why != "communication" or self.kind(node) != "wait":
                super().follow(node, earlier, why)


class BlocksLeaveTheirOrder(_Enforce):
    """Collectives between two blocks do not hold them back: starts change places (broken-order, deadlock)."""

    class reading(GraphReading):
        def follow(self, node: fx.Node, earlier: Iterable[fx.Node], why: Why) -> None:
            if why != "communication":
                super().follow(node, earlier, why)


def _kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


_ORDER = _kinds("broken-order", "deadlock", "collective-mismatch")
_VALUES = _kinds("wrong-value", "async-race")

#: Every mutant, with the kinds of finding of which one at least must be there.
EXPECTED: dict[str, frozenset[str]] = {
    "GatheredIntoFirstBuffer": _VALUES,
    "BufferTakenThoughRead": _VALUES,
    "GatheredIntoTheSlice": _kinds(
        "malformed-graph", "rewritten-raises", "pass-raised", "stale-metadata", "wrong-value"
    ),
    "CopiedInReverse": _kinds("wrong-value"),
    "CopyBeyondItsInterval": _VALUES,
    "LastCopyForAll": _kinds("pass-raised", "wrong-value"),
    "OverwrittenSourceUsed": _kinds("wrong-value"),
    "KeptParameterRemoved": _kinds("wrong-value"),
    "FirstFreeingDropped": _kinds("leak", "wrong-value"),
    "ResizesOfOthersDropped": _kinds("use-after-free", "rewritten-raises"),
    "ViewsKeepTheParameter": _kinds("wrong-value", "use-after-free", "rewritten-raises"),
    "DeclaredBehindItself": _kinds("broken-order"),
    "StartsSinkBelowWaits": _ORDER,
    "BlocksLeaveTheirOrder": _ORDER,
}

MUTANTS: dict[str, type[Any]] = {name: globals()[name] for name in EXPECTED}
