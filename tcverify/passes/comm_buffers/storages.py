"""The storages of a graph's values: their owners, until when they are needed, and which collectives in flight use them.

Followed from the placeholders on, see `program.specs`. Two views of one storage count as one, also where they do not overlap.

Time is the position of a node in the graph. A start needs its operands until all its results have been waited for, or to the end
of the graph if there is no wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tcverify.errors import UnsupportedOp
from tcverify.ops import Op, ShapeError, TensorSpec, lookup
from tcverify.ops.aliasing import mutated_operands
from tcverify.ops.leaves import leaves
from tcverify.program.specs import InferredSpecs, same_layout

#: Ops that change the size of a storage, or which part of it a value is: the beginnings of their names behind the namespace.
_REFITTING = ("resize", "set_", "as_strided_", "t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_")


@dataclass(slots=True, eq=False)
class Storage:
    """One storage.

    Attributes:
        owner: the call that made it as its only result; None for inputs, attributes, and what came in a tuple or list.
        spec: the tensor that the owner returned.
        birth: position of the owner.
        touched: the last position of a node that touches it.
        reads: the two starts that need it longest while they are in flight, as (position of the end, start), latest first.
        returned: whether an output lives in it.
        odd: whether something is done with it that cannot be followed.
        overwritten: whether a node writes into it while a start that has copied it is in flight: in a buffer, which peers read
            until the wait, there would be no copy.
        group: the group in whose buffers it is to live, once that is known.
    """

    owner: fx.Node | None = None
    spec: TensorSpec | None = None
    birth: int = 0
    touched: int = 0
    reads: tuple[tuple[int, fx.Node], ...] = ()
    returned: bool = False
    odd: bool = False
    overwritten: bool = False
    group: str | None = None
    _into: Storage | None = None

    @property
    def nbytes(self) -> int:
        """What the owner's tensor takes."""
        return self.spec.nbytes if self.spec is not None else 0

    @property
    def death(self) -> int:
        """The last position at which it is needed."""
        return max(self.touched, *(end for end, _ in self.reads), 0)

    def dead_behind(self, start: fx.Node, position: int) -> bool:
        """Whether only `start` needs it after `position`."""
        return not self.returned and max(self.touched, *(e for e, one in self.reads if one is not start), 0) <= position

    def needed(self, reads: Iterable[tuple[int, fx.Node]]) -> None:
        """Add starts that need it while they are in flight."""
        ends: dict[fx.Node, int] = {}
        for end, start in (*self.reads, *reads):
            ends[start] = max(end, ends.get(start, 0))
        self.reads = tuple(sorted(((e, s) for s, e in ends.items()), key=lambda pair: -pair[0])[:2])

    def found(self) -> Storage:
        """The storage that this one has become part of, or itself."""
        storage = self
        while storage._into is not None:
            if storage._into._into is not None:
                storage._into = storage._into._into
            storage = storage._into
        return storage

    def take_in(self, other: Storage) -> None:
        """Say that what was to live in `other` lives here."""
        other._into = self
        self.touched = max(self.touched, other.touched)
        self.needed(other.reads)
        self.returned, self.odd = self.returned or other.returned, self.odd or other.odd
        self.overwritten |= other.overwritten


@dataclass(slots=True, eq=False)
class CollectiveFlight:
    """An asynchronous collective: from its start until all its results have been waited for.

    Attributes:
        end: position where it ends; that of the output node if there is no wait.
        awaited: whether all its results are waited for.
        risky: whether another collective in flight already used a storage that it reads or writes when it started.
    """

    start: fx.Node
    position: int
    outputs: set[Storage]
    end: int
    awaited: bool = False
    risky: bool = False


@dataclass(slots=True, eq=False)
class Analysis:
    """A graph, seen from its storages.

    Attributes:
        specs: per node, what it produces; None where nothing is known.
        position: of nodes.
        flights: asynchronous collectives by their start, in order.
        completed: per wait, the flights that it ended, or that the wait before it on that storage ended.
        talkers: (position, group or None) of what communicates or may, in order.
        misdescribed: nodes whose recorded value has another layout than its operands imply.
    """

    specs: InferredSpecs = field(default_factory=InferredSpecs)
    position: dict[fx.Node, int] = field(default_factory=dict)
    flights: dict[fx.Node, CollectiveFlight] = field(default_factory=dict)
    completed: dict[fx.Node, tuple[CollectiveFlight, ...]] = field(default_factory=dict)
    talkers: list[tuple[int, str | None]] = field(default_factory=list)
    misdescribed: set[fx.Node] = field(default_factory=set)
    _storages: dict[int, Storage] = field(default_factory=dict)
    _unknown: dict[fx.Node, list[Storage]] = field(
        default_factory=dict
    )  # contents of a value of which nothing is known

    def spec(self, node: Any) -> TensorSpec | None:
        """The one tensor that a node produces, or None."""
        spec = self.specs.of.get(node) if isinstance(node, fx.Node) else None
        return spec if isinstance(spec, TensorSpec) else None

    def storage(self, node: Any) -> Storage | None:
        """The storage of the one tensor that a node produces, or None."""
        spec = self.spec(node)
        return self.numbered(spec) if spec is not None else None

    def held(self, node: fx.Node) -> list[Storage]:
        """The storages of all tensors in the value of a node, each once."""
        if node in self._unknown:
            return list(dict.fromkeys(storage.found() for storage in self._unknown[node]))
        return list(dict.fromkeys(map(self.numbered, leaves(self.specs.of.get(node), TensorSpec))))

    def keep(self, node: fx.Node, spec: TensorSpec, storage: Storage) -> None:
        """Say what an inserted node produces, in a storage of its own."""
        number = self.specs.fresh()
        self._storages[number] = storage
        self.specs.keep(node, spec.stored(number))

    def numbered(self, spec: TensorSpec) -> Storage:
        """The storage that a spec of this analysis names."""
        if spec.alias is None:
            return Storage(odd=True)
        return self._storages.setdefault(spec.alias, Storage()).found()


def operation(node: fx.Node) -> Op | None:
    """The op that a node calls, where it has a meaning."""
    op = lookup(node.target) if node.op == "call_function" else None
    return op if op is not None and op.run is not None else None


def group_of(node: fx.Node) -> str | None:
    """The name of the group that a call communicates over, if its op names one."""
    op = operation(node)
    if op is None or op.group is None:
        return None
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    value = node.kwargs.get(op.group, dict(zip(names, node.args, strict=False)).get(op.group))
    return value if isinstance(value, str) else None


def analyse(graph: fx.Graph) -> Analysis:
    """Follow the storages of a graph. Linear in it; never raises for what it does not understand."""
    found = Analysis()
    pending: dict[Storage, list[CollectiveFlight]] = {}
    ended: dict[Storage, tuple[CollectiveFlight, ...]] = {}
    copied: dict[Storage, list[CollectiveFlight]] = {}
    for position, node in enumerate(graph.nodes):
        found.position[node] = position
        operands = node.all_input_nodes
        touched = list(dict.fromkeys(storage for operand in operands for storage in found.held(operand)))
        for storage in touched:
            storage.touched = position
        if node.op == "output":
            for storage in touched:
                storage.returned = True
            break
        op = operation(node)
        if node.op in ("placeholder", "get_attr"):
            found.specs.keep_recorded(node, node.meta.get("val"))
        elif op is None or not _follow(found, node):
            _unknown(found, node, touched)
        else:
            _own(found, node, position, touched)
            if _refits(op):
                for storage in touched:
                    storage.odd = True
        if node.op.startswith("call") and _talks(op):
            found.talkers.append((position, group_of(node)))
        if copied and (op is None or op.phase != "wait"):
            _overwrite(found, node, copied)
        if op is not None and op.phase == "start":
            _begin(found, node, position, touched, pending)
            for storage in touched if op.copies else ():
                copied.setdefault(storage, []).append(found.flights[node])
        elif op is not None and op.phase == "wait":
            _end(found, node, position, touched, pending, ended)
    _settle(found, len(found.position) - 1)
    return found


def _follow(found: Analysis, node: fx.Node) -> bool:
    """Infer what a call produces; whether that is known."""
    if any(operand in found._unknown or found.specs.of.get(operand) is None for operand in node.all_input_nodes):
        return False
    try:
        spec = found.specs.infer(node)
    except (ShapeError, UnsupportedOp):
        return False
    found.specs.keep(node, spec)
    if not same_layout(spec, node.meta.get("val")):
        found.misdescribed.add(node)
    return True


def _unknown(found: Analysis, node: fx.Node, touched: list[Storage]) -> None:
    """A node of which it is not known what it returns and writes: it may return any of its operands' storages, or a new one."""
    for storage in touched:
        storage.odd = True
    found._unknown[node] = [*touched, Storage(odd=True)]


def _own(found: Analysis, node: fx.Node, position: int, touched: list[Storage]) -> None:
    """Say who made the storages that appear with a node."""
    spec = found.spec(node)
    for storage in found.held(node):
        if storage in touched:
            continue
        storage.birth = storage.touched = position
        if spec is not None:
            storage.owner, storage.spec = node, spec


def _talks(op: Op | None) -> bool:
    """Whether an op communicates, or may; a wait asks for nothing new."""
    return op is None or op.effect or (op.collective and op.phase != "wait")


def _refits(op: Op) -> bool:
    return op.name.split("::")[1].startswith(_REFITTING)


def _begin(
    found: Analysis,
    node: fx.Node,
    position: int,
    touched: list[Storage],
    pending: dict[Storage, list[CollectiveFlight]],
) -> None:
    outputs = set(found.held(node))
    flight = CollectiveFlight(node, position, outputs, position)
    flight.risky = any(pending.get(storage) for storage in {*touched, *outputs})
    for storage in outputs:
        pending.setdefault(storage, []).append(flight)
    found.flights[node] = flight


def _overwrite(found: Analysis, node: fx.Node, copied: dict[Storage, list[CollectiveFlight]]) -> None:
    """Say which storages a node writes into that starts in flight have copied."""
    for operand in mutated_operands(node):
        for storage in found.held(operand):
            storage.overwritten |= any(flight.outputs for flight in copied.get(storage, ()))


def _end(
    found: Analysis,
    node: fx.Node,
    position: int,
    touched: list[Storage],
    pending: dict[Storage, list[CollectiveFlight]],
    ended: dict[Storage, tuple[CollectiveFlight, ...]],
) -> None:
    completed: list[CollectiveFlight] = []
    for storage in touched:
        flights = tuple(pending.pop(storage, ()))
        if flights:
            ended[storage] = flights
        completed += ended.get(storage, ())
        for flight in flights:
            flight.outputs.discard(storage)
            if not flight.outputs:
                flight.end, flight.awaited = position, True
    found.completed[node] = tuple(dict.fromkeys(completed))


def _settle(found: Analysis, last: int) -> None:
    """Now that it is known when flights end: what they read and write is needed until then."""
    for node, flight in found.flights.items():
        if not flight.awaited:
            flight.end = last
            for storage in (s for operand in (node, *node.all_input_nodes) for s in found.held(operand)):
                storage.odd = True  # still in flight when the next iteration begins
        for operand in (node, *node.all_input_nodes):
            for storage in found.held(operand):
                storage.needed([(flight.end, node)])
