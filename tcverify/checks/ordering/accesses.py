"""Accesses: what the nodes of one rank's graph do to storage, and which of them are asynchronous. Data for the checks
of order and memory.

A *start* reads its operands and writes its result at any time until the first *wait* on the storage of that result. A view, a
`getitem`, a call that depends only on shapes and a wait refer to storage without reading or writing its contents.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from tcverify.checks.memory.storage import Region, Touch, memory_of
from tcverify.ops import DEALLOCATE, Op, lookup, schema_of
from tcverify.ops.leaves import leaves
from tcverify.program import Program, RankConstant
from tcverify.program.graph import constant_value

#: Resizes a storage: 0 frees it, more allocates it.
RESIZE = "inductor::resize_storage_bytes_"

#: Prefixes of ops that depend on shapes, and not on the contents of a tensor.
_SHAPE_ONLY = (
    "aten::sym_", "aten::size", "aten::stride", "aten::numel", "aten::dim", "aten::is_contiguous", "aten::new_empty",
    "aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::empty_like", "aten::zeros_like", "aten::ones_like",
    "aten::full_like", "aten::rand_like", "aten::randn_like", "p2p::recv",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer: what a start reads, and the storages that it writes."""

    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(slots=True)
class AccessStep:
    """What one node does.

    Attributes:
        name, op: the node, and its op by qualified name (for nodes that are not calls, "placeholder", "output", …).
        touches: storages of its operands, however it uses them.
        holds: storages of its value.
        operands: indices of its argument nodes.
        reads, writes: storages whose content it reads; storages of earlier values that it writes into. Those of its transfers are
            excluded.
        transfers: of a start, the transfers that it begins.
        awaits: of a wait, the storages for which it waits.
        resized: of an op that frees or allocates, storage → its new size in bytes.
        after: names of nodes that must precede this one.
        collective, effect: whether it communicates, and whether it has effects that its operands do not show.
        buffer: `meta["comm_buffer"]`, whatever it is.
    """

    name: str
    op: str
    touches: tuple[int, ...]
    holds: tuple[int, ...]
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    awaits: tuple[int, ...] = ()
    resized: dict[int, int | None] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    collective: bool = False
    effect: bool = False
    buffer: Any = None
    operands: tuple[int, ...] = ()

    @property
    def frees(self) -> tuple[int, ...]:
        return tuple(storage for storage, size in self.resized.items() if size == 0)

    @property
    def issues(self) -> bool:
        """Whether it is a start, a blocking collective or an op with a side effect: ops on which ranks must agree."""
        return bool(self.transfers) or (self.collective and not self.awaits) or self.effect


@dataclass(eq=False)
class Accesses:
    """What one rank's graph does, in graph order.

    Attributes:
        inputs: storage → name of the input that it belongs to.
        outputs: storages of what the graph returns.
        owner: storage → (name of the node that created it, which of that node's storages).
        nbytes: storage → its extent in bytes, as far as values reach, if known.
        regions: per node, where in their storages the tensors of its value lie; empty if unknown.
        parts: of a graph in host IR, the accesses of each node to parts of storages.
    """

    steps: list[AccessStep] = field(default_factory=list)
    inputs: dict[int, str] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()
    owner: dict[int, tuple[str, int]] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    regions: list[tuple[Region, ...]] = field(default_factory=list)
    parts: list[tuple[Touch, ...]] = field(default_factory=list)

    def extent(self, index: int, storage: int) -> tuple[float, float]:
        """The byte range of a storage that a node can access: the extent of its operands and its value."""
        step = self.steps[index]
        spans = []
        for node in (*step.operands, index):
            if storage in self.steps[node].holds:
                found = [region for region in self.regions[node] if region[0] == storage]
                if not found:
                    return 0.0, math.inf
                spans += found
        return min((low for _, low, _ in spans), default=0.0), max((high for _, _, high in spans), default=math.inf)

    def value(self, storage: int) -> str:
        """The name of the first value that belongs to a storage."""
        return self.owner[storage][0]


_KNOWN: weakref.WeakKeyDictionary[fx.Graph, tuple[list[str], dict[Any, Accesses]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Traits:
    """The features of a graph that concern the checks of order and memory.

    Attributes:
        starts: asynchronous collectives.
        frees: explicit frees or allocations.
        buffers: values with a place in a communication buffer.
        declares: nodes that declare which nodes they follow.
    """

    starts: bool
    frees: bool
    buffers: bool
    declares: bool


def traits_of(graph: fx.Graph) -> Traits:
    """Return the features of a graph. Cached, and cheap: most graphs have none, and then checks stop here."""
    found = _TRAITS.get(graph)
    if found is None:
        ops = [lookup(node.target) for node in graph.nodes if node.op == "call_function"]
        found = _TRAITS[graph] = Traits(
            starts=any(op.phase == "start" for op in ops),
            frees=any(op.name in (RESIZE, DEALLOCATE) for op in ops),
            buffers=any("comm_buffer" in node.meta for node in graph.nodes),
            declares=any("after" in node.meta for node in graph.nodes),
        )
    return found


_TRAITS: weakref.WeakKeyDictionary[fx.Graph, Traits] = weakref.WeakKeyDictionary()


def accesses_of(program: Program, rank: int) -> Accesses:
    """Return what a rank's graph does. Cached: ranks share it unless rank constants determine the accesses."""
    binding = program.ranks[rank]
    graph = program.graphs[binding.graph]
    known = _KNOWN.get(graph)
    if known is None:
        known = _KNOWN[graph] = _constants_that_matter(graph), {}
    names, found = known
    key = tuple([repr(binding.constants.get(name)) for name in names])
    accesses = found.get(key)
    if accesses is None:
        accesses = found[key] = _read(graph, binding.constants)
    return accesses


def distinct_pairs(original: Program, rewritten: Program) -> Iterator[tuple[int, Accesses, Accesses]]:
    """The distinct pairs of what a rank's graph did before and does after, each with the first rank that has it."""
    seen = set()
    for rank in range(rewritten.world_size):
        before, after = accesses_of(original, rank), accesses_of(rewritten, rank)
        if (id(before), id(after)) not in seen:
            seen.add((id(before), id(after)))
            yield rank, before, after


def _constants_that_matter(graph: fx.Graph) -> list[str]:
    """The rank constants that select a result of a tuple, or what is freed."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    chosen = [node for node in calls if lookup(node.target).name in (RESIZE, "python::getitem")]
    return list(dict.fromkeys(one.name for node in chosen for one in leaves((node.args, node.kwargs), RankConstant)))


def _read(graph: fx.Graph, constants: Mapping[str, Any]) -> Accesses:
    memory = memory_of(graph, constants)
    found = Accesses(nbytes=memory.nbytes, regions=memory.regions, parts=memory.touches)
    holds: dict[fx.Node, tuple[int, ...]] = {}
    numbers: dict[fx.Node, int] = {}
    unknown = set(memory.unknown)
    buffers: set[int] = set()
    for number, node in enumerate(graph.nodes):
        held = holds[node] = memory.holds[number]
        numbers[node] = number
        for position, storage in enumerate(held):
            found.owner.setdefault(storage, (node.name, position))
        if node.op in ("placeholder", "get_attr"):
            for storage in held:
                found.inputs.setdefault(storage, node.name)
        touched = tuple(dict.fromkeys(s for operand in node.all_input_nodes for s in holds[operand]))
        after = node.meta.get("after")
        step = AccessStep(node.name, node.op, touched, held, buffer=node.meta.get("comm_buffer"))
        step.operands = tuple(numbers[operand] for operand in node.all_input_nodes)
        step.after = tuple(map(str, after)) if isinstance(after, (list, tuple)) else ()
        if node.op == "output":
            step.reads = found.outputs = held
        elif node.op not in ("placeholder", "get_attr"):
            op = lookup(node.target) if node.op == "call_function" else None
            step.op = op.name if op is not None else f"{node.op}::{node.target}"
            _call(step, node, op, memory.writes[number], number in unknown, holds, constants)
            if op is not None and op.copies:
                _copy_operands(step, buffers)
        if step.buffer is not None:
            buffers.update(held)
        found.steps.append(step)
    return found


def _call(
    step: AccessStep,
    node: fx.Node,
    op: Op | None,
    writes: tuple[int, ...],
    unknown: bool,
    holds: Mapping[fx.Node, tuple[int, ...]],
    constants: Mapping[str, Any],
) -> None:
    if op is not None:
        step.collective, step.effect = op.collective, op.effect
    if op is not None and op.phase == "wait":
        step.awaits = step.touches
    elif op is not None and op.phase == "start":
        step.transfers = _transfers(node, writes, holds)
    elif op is not None and op.name == DEALLOCATE:
        step.resized = dict.fromkeys(step.touches, 0)
    elif op is not None and op.name == RESIZE:
        size = node.args[1] if len(node.args) > 1 else node.kwargs.get("new_size")
        size = constant_value(size, constants) if isinstance(size, RankConstant) else size
        operand = node.args[0] if node.args else node.kwargs.get("variable")
        resized = holds[operand] if isinstance(operand, fx.Node) else ()
        step.resized = dict.fromkeys(resized, size if type(size) is int else None)
    else:
        step.writes = writes
        step.reads = step.touches if unknown or not _only_looks(step, writes) else ()


def _copy_operands(step: AccessStep, buffers: set[int]) -> None:
    """Let a start that works on copies of its operands read these at once. Not those in communication buffers: there a compiler
    leaves the copy out, and peers read the buffer."""
    step.reads = step.touches
    step.transfers = tuple(
        replace(transfer, source=tuple(s for s in transfer.source if s in buffers)) for transfer in step.transfers
    )


def _only_looks(step: AccessStep, writes: tuple[int, ...]) -> bool:
    """Whether a call creates views, or computes numbers from shapes."""
    if step.op.startswith(_SHAPE_ONLY):
        return True
    if writes or step.effect or step.collective:
        return False
    if step.holds:
        return set(step.touches).issuperset(step.holds)
    return step.op.startswith("python::")


def _transfers(
    node: fx.Node, writes: tuple[int, ...], holds: Mapping[fx.Node, tuple[int, ...]]
) -> tuple[Transfer, ...]:
    """The transfers that a start begins: from its first argument, or each tensor of it, to the corresponding result."""
    schema = schema_of(node.target)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = node.args[0] if node.args else node.kwargs.get(names[0]) if names else None
    sources = [holds[v] for v in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(v, fx.Node)]
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return tuple(Transfer(source, holds[out]) for source in sources or [()])
    if "x" in names and not writes:  # a rank that receives nothing waits for a handle of the communication
        return (Transfer(tuple(dict.fromkeys(s for source in sources for s in source)), holds[node]),)
    if names[:1] == ["out"]:
        return (Transfer((), holds[node]),)
    if writes:
        return tuple(Transfer(source, source) for source in sources)
    made = holds[node]
    if len(made) == len(sources):
        return tuple(Transfer(source, (target,)) for source, target in zip(sources, made, strict=True))
    return (Transfer(tuple(dict.fromkeys(s for source in sources for s in source)), made),)


__all__ = ["RESIZE", "AccessStep", "Accesses", "Traits", "Transfer", "accesses_of", "distinct_pairs", "traits_of"]
