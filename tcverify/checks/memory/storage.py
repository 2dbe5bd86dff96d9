"""Storage: which values of a graph share memory, and what its nodes write into.

Followed from the placeholders on by shape inference, which runs ops and sees what they return. What graphs record of storage
is not believed: a record may keep the storage of an operand that a pass has replaced.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from tcverify.checks.memory.parts import ByteRange, byte_range_of
from tcverify.errors import ProgramError, UnsupportedOp
from tcverify.ops import ShapeError, TensorSpec, infer, lookup, schema_of
from tcverify.program import RankConstant
from tcverify.program.graph import constant_value, map_structure


class RealValues:
    """The specs of a graph's nodes, with the storage that each value really has. Nodes are added in graph order.

    Args:
        groups: of the rank that runs the graph, by name; see `infer`.
    """

    def __init__(self, groups: Mapping[str, Sequence[int]] = MappingProxyType({})) -> None:
        self._groups = groups
        self._of: dict[fx.Node, Any] = {}
        self.fresh = itertools.count().__next__

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._of

    def __getitem__(self, node: fx.Node) -> Any:
        return self._of[node]

    def keep(self, node: fx.Node, spec: Any) -> None:
        """Say what a node produces."""
        self._of[node] = spec

    def keep_apart(self, node: fx.Node, recorded: Any) -> Any:
        """Say that a node produces what is recorded, each tensor with a storage of its own; returns that."""
        spec = self._of[node] = map_structure(self._own, recorded)
        return spec

    def infer(self, node: fx.Node, constants: Mapping[str, Any]) -> Any:
        """Return what a call produces, given that its operands are known.

        Raises:
            ShapeError: the operands do not fit together.
            UnsupportedOp: the op is in no table, or the size of its group is not known.
        """

        def known(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self._of[value]
            return constant_value(value, constants) if isinstance(value, RankConstant) else value

        kwargs = dict(map_aggregate(node.kwargs, known)) if node.kwargs else {}
        return infer(node.target, map_aggregate(node.args, known), kwargs, self.fresh, self._groups)

    def _own(self, spec: Any) -> Any:
        return replace(spec, alias=self.fresh()) if isinstance(spec, TensorSpec) else spec


@dataclass(slots=True)
class GraphMemory:
    """What the nodes of a graph hold and write, by their numbers in graph order.

    Storages are numbers. Two views of one storage count as one, also where they do not overlap: which elements a kernel
    touches is known for none of them exactly, and runtimes track storages.

    Attributes:
        holds: the storages of the tensors in a node's value; empty for values without tensors.
        writes: the storages of earlier values that a node writes into.
        unknown: nodes of which it is not known what they write and alias: they count as reading their operands and making
            a value of their own.
        nbytes: storage → bytes that the values in it reach. Storages of which nothing is known are not in it.
        regions: where in their storages the tensors of a node's value lie; empty where that is not known.
        touches: of a graph in host IR, per node what it does with which parts of storages; empty of other graphs.
    """

    holds: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    unknown: list[int]
    nbytes: dict[int, int]
    regions: list[tuple[Region, ...]]
    touches: list[tuple[Touch, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Touch:
    """An operand, or a result of its own, of a call.

    Attributes:
        storage: which one.
        through: number of the node whose value it is.
        part: which bytes; None where that is not known.
        writes: whether the call writes into it.
    """

    storage: int
    through: int
    part: ByteRange | None
    writes: bool


#: Bytes of a storage, from the first to behind the last element of a value: (storage, first, end).
Region = tuple[int, int, int]


def in_host_ir(graph: fx.Graph) -> bool:
    """Whether a graph contains an op of host IR. Remembered: graphs of programs do not change."""
    known = _IN_HOST_IR.get(graph)
    if known is None:
        ops = (lookup(node.target).name for node in graph.nodes if node.op == "call_function")
        known = _IN_HOST_IR[graph] = any(name.startswith("host_ir::") for name in ops)
    return known


_IN_HOST_IR: weakref.WeakKeyDictionary[fx.Graph, bool] = weakref.WeakKeyDictionary()


def regions_of(value: Any) -> tuple[Region, ...]:
    """Return where the tensors of a value, given as specs, lie in their storages."""
    if isinstance(value, TensorSpec):
        if value.alias is None:
            return ()
        if not value.numel:
            return ((value.alias, 0, 0),)
        size = value.dtype.itemsize
        last = value.offset + sum((n - 1) * step for n, step in zip(value.shape, value.stride, strict=True))
        return ((value.alias, value.offset * size, (last + 1) * size),)
    if not isinstance(value, (tuple, list, dict)):
        return ()
    found: list[Region] = []
    map_structure(lambda leaf: found.extend(regions_of(leaf)), value)
    return tuple(found)


def memory_of(graph: fx.Graph, constants: Mapping[str, Any]) -> GraphMemory:
    """Return what the nodes of a program's graph hold and write. Linear in the graph; never raises."""
    values = RealValues()
    memory = GraphMemory([], [], [], {}, [])
    holds: dict[fx.Node, tuple[int, ...]] = {}
    attributes: dict[str, tuple[int, ...]] = {}
    numbers: dict[fx.Node, int] | None = {} if in_host_ir(graph) else None
    for number, node in enumerate(graph.nodes):
        writes: tuple[int, ...] = ()
        if node.op == "output":
            held = tuple(dict.fromkeys(s for operand in node.all_input_nodes for s in holds[operand]))
        elif node.op in ("placeholder", "get_attr"):
            held = _input(node, values, attributes)
        else:
            try:
                if node.op != "call_function" or any(operand not in values for operand in node.all_input_nodes):
                    raise UnsupportedOp(node.name, "not inferred")
                spec = values.infer(node, constants)
                values.keep(node, spec)
                held, writes = _storages(spec), _written(node, holds)
            except (UnsupportedOp, ShapeError, ProgramError):
                described = _as_described(node, values, holds)
                if described is None:
                    memory.unknown.append(number)
                held, writes = described or (_apart(node, values), ())
        regions = regions_of(values[node]) if node in values else ()
        for storage, _, end in regions:
            memory.nbytes[storage] = max(memory.nbytes.get(storage, 0), end)
        memory.regions.append(regions)
        holds[node] = held
        memory.holds.append(held)
        memory.writes.append(writes)
        if numbers is not None:
            numbers[node] = number
            memory.touches.append(_touches(node, numbers, holds, values))
    return memory


def _touches(
    node: fx.Node, numbers: Mapping[fx.Node, int], holds: Mapping[fx.Node, tuple[int, ...]], values: RealValues
) -> tuple[Touch, ...]:
    """What a node reads and writes, each part once; what it makes counts as written."""
    written = {operand for operand, writes in _annotated(node) if writes} if node.op == "call_function" else set()
    found: dict[Touch, None] = {}
    known: set[int] = set()
    for operand in node.all_input_nodes:
        known.update(holds[operand])
        found.update(dict.fromkeys(_parts(operand, numbers[operand], holds[operand], values, operand in written)))
    if node.op != "output":
        own = [storage for storage in holds[node] if storage not in known]
        found.update(dict.fromkeys(_parts(node, numbers[node], own, values, writes=True)))
    return tuple(found)


def _parts(node: fx.Node, number: int, storages: Sequence[int], values: RealValues, writes: bool) -> Iterator[Touch]:
    """The parts of storages that a value takes; tensors without elements take none."""
    specs: list[TensorSpec] = []
    if node in values:
        map_structure(lambda leaf: specs.append(leaf) if isinstance(leaf, TensorSpec) else None, values[node])
    for storage in storages:
        mine = [spec for spec in specs if spec.alias == storage]
        parts = [byte_range_of(spec) for spec in mine]
        yield from (Touch(storage, number, part, writes) for part in parts if part is not None)
        if not mine:
            yield Touch(storage, number, None, writes)


def _input(node: fx.Node, values: RealValues, attributes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    if node.op == "get_attr" and str(node.target) in attributes:
        return attributes[str(node.target)]  # without a spec: what follows goes by the schemas of ops
    held = _apart(node, values)
    if node.op == "get_attr":
        attributes[str(node.target)] = held
    return held


def _apart(node: fx.Node, values: RealValues) -> tuple[int, ...]:
    """The storages of a node whose value is taken to be its own: as recorded, else one of which nothing is known."""
    recorded = node.meta.get("val")
    return (values.fresh(),) if recorded is None else _storages(values.keep_apart(node, recorded))


def _as_described(
    node: fx.Node, values: RealValues, holds: Mapping[fx.Node, tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What a call holds and writes as the schema of its op says; None where no schema says it."""
    if node.op != "call_function":
        return None
    op = lookup(node.target)
    if op.name == "python::getitem" and node.all_input_nodes:
        return holds[node.all_input_nodes[0]], ()
    if op.name.startswith("python::"):
        return _apart(node, values), ()
    schema = schema_of(node.target)
    if schema is None:
        return None
    if any(r.alias_info is not None for r in schema.returns):
        shared = tuple(dict.fromkeys(s for o, _ in _annotated(node) for s in holds[o]))
        return shared, _written(node, holds)
    if op.run is not None and op.aliases and not schema.is_mutable:
        return None  # tagged as one that may share storage, without saying with what
    return _apart(node, values), _written(node, holds)


def _written(node: fx.Node, holds: Mapping[fx.Node, tuple[int, ...]]) -> tuple[int, ...]:
    schema = schema_of(node.target)
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(dict.fromkeys(s for operand, writes in _annotated(node) if writes for s in holds[operand]))


def _annotated(node: fx.Node) -> list[tuple[fx.Node, bool]]:
    """The operands whose storage the schema says the op returns or writes, each with whether it writes."""
    found: list[tuple[fx.Node, bool]] = []
    schema = schema_of(node.target)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is None:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        values: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        found += [(v, bool(argument.alias_info.is_write)) for v in values if isinstance(v, fx.Node)]
    return found


def _storages(spec: Any) -> tuple[int, ...]:
    """The storages of the tensors in a value, each once."""
    if isinstance(spec, TensorSpec):
        return () if spec.alias is None else (spec.alias,)
    if not isinstance(spec, (tuple, list, dict)):
        return ()
    found: list[int] = []
    map_structure(lambda s: found.append(s.alias) if isinstance(s, TensorSpec) and s.alias is not None else None, spec)
    return tuple(dict.fromkeys(found))


__all__ = ["GraphMemory", "RealValues", "Region", "Touch", "in_host_ir", "memory_of"]
