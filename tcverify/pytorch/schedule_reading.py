"""Reads the nodes of Inductor's scheduler as plain data: which storages they touch, and which of them communicate."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tcverify.ops import qualified_name
from tcverify.program.partition import Partition
from tcverify.pytorch.schedules import NodeSchedule, Role, ScheduleStep, resolve_waits


def names_of_nodes(snodes: Iterable[Any]) -> list[list[str]]:
    """The names of nodes, those of one fused node together."""
    return [[leaf.get_name() for leaf in snode.get_nodes()] for snode in snodes]


def read_schedule(snodes: Sequence[Any], groups: Collection[str]) -> NodeSchedule:
    """The nodes of a scheduler.

    Args:
        groups: the names that process groups have.
    """
    from torch._inductor.virtualized import V

    leaves = [list(snode.get_nodes()) for snode in snodes]
    storages = _Storages(leaf for unit in leaves for leaf in unit)
    steps = iter(resolve_waits([_step(leaf, storages, groups) for unit in leaves for leaf in unit]))
    units = tuple(tuple(next(steps) for _ in unit) for unit in leaves)
    given = set().union(*(storages.of(str(name)) for name in V.graph.graph_inputs))
    sizes = {storage: size for storage, size in storages.sizes.items() if storage not in given}
    kept = frozenset().union(*(storages.of(str(name)) for name in V.graph.get_output_names()))
    return NodeSchedule(units, sizes, kept, storages.whole)


class _Storages:
    """The storages of each buffer: views and writes into a buffer share one. Identified by the names of buffers.

    What is concatenated without a copy is written piece by piece: each piece counts as a storage of its own, and the whole as
    one more, which holds no bytes that are not in a piece.

    Attributes:
        children: the outputs of an op that has several, by the op's buffer.
        sizes: bytes, of storages that are allocated.
        whole: of which storage a piece is part.
    """

    def __init__(self, leaves: Iterable[Any]) -> None:
        from torch._inductor import ir

        self._classes: Partition[str] = Partition()
        self._packs: dict[str, set[str]] = {}  # the buffers that an op returns, by the name of the op's own
        self.children: dict[str, list[str]] = {}
        self.whole: dict[str, str] = {}
        own: dict[str, int] = {}
        pieces: dict[str, str] = {}
        for leaf in leaves:
            for buffer in leaf.get_outputs():
                name = buffer.get_name()
                others = {*buffer.get_mutations(), *buffer.get_aliases()}
                if isinstance(getattr(buffer.node, "layout", None), ir.NonOwningLayout):
                    pieces[name] = next(iter(buffer.get_aliases()))
                    continue
                if len(others) > 1 and not buffer.node.has_tensor_output():
                    self._packs[name] = others
                    continue
                for other in others:
                    self._join(name, other)
                if not others and buffer.node.has_tensor_output():
                    own[name] = _bytes(buffer.node)
            parent = _parent_of(leaf)
            if parent is not None:
                self.children.setdefault(parent, []).extend(buffer.get_name() for buffer in leaf.get_outputs())
        self.sizes: dict[str, int] = {}
        for name, size in own.items():
            storage = self._classes.of(name)
            self.sizes[storage] = max(self.sizes.get(storage, 0), size)
        self.whole = {self._classes.of(name): self._classes.of(other) for name, other in pieces.items()}

    def of(self, name: str) -> frozenset[str]:
        """The storages of a buffer, by the name of one of those in it."""
        if name in self._packs:
            return frozenset().union(*map(self.of, self._packs[name]))
        root = self._classes.of(name)
        inside = (self.of(piece) for piece, whole in self.whole.items() if whole == root)
        return frozenset({root}).union(*inside)

    def _join(self, one: str, other: str) -> None:
        first, second = sorted((self._classes.of(one), self._classes.of(other)), key=lambda name: (len(name), name))
        self._classes.join(first, second)


def _bytes(node: Any) -> int:
    layout = node.get_layout()
    try:
        return int(layout.storage_size()) * int(layout.dtype.itemsize)
    except (TypeError, AttributeError):  # a size that is not a number, or not a tensor
        return 0


def _parent_of(leaf: Any) -> str | None:
    """The buffer of the op of which a node picks one output."""
    from torch._inductor import ir

    inputs: Any = leaf.node.inputs if isinstance(leaf.node, ir.MultiOutput) else None
    return str(inputs[0].get_name()) if inputs is not None else None


def _step(leaf: Any, storages: _Storages, groups: Collection[str]) -> ScheduleStep:
    from torch._inductor import ir
    from torch._inductor.dependencies import WeakDep

    reads = {dep.name for dep in leaf.read_writes.reads if not isinstance(dep, WeakDep)}
    made = {buffer.get_name() for buffer in leaf.get_outputs()}
    picks = _parent_of(leaf) is not None
    # Picking an output, and calling pieces a whole, runs nothing.
    idle = picks or isinstance(leaf.node, ir.NopKernel)
    writes = set() if idle else made | {dep.name for dep in leaf.read_writes.writes}
    if idle:
        reads |= made
    for name in made:
        writes.update(storages.children.get(name, ()))
    role, op, group = _role(leaf.node, groups)
    nothing: frozenset[str] = frozenset()
    read, written = (nothing.union(*map(storages.of, touched)) for touched in (reads, writes))
    called: str = leaf.get_name()
    return ScheduleStep(called, op, read, written, role, group, int(called.rpartition("op")[2]))


def _role(node: Any, groups: Collection[str]) -> tuple[Role, str, str | None]:
    """What a node is, what it calls, and the group that it names."""
    from torch._inductor import ir

    if node is None:
        return "compute", "loops", None
    target = getattr(node, "op_overload", None)
    op = qualified_name(target) if target is not None else type(node).__name__
    role: Role = "compute"
    if isinstance(node, ir._WaitKernel):
        role = "wait"
    elif isinstance(node, ir._CollectiveKernel) or op.startswith("symm_mem::"):
        role = "collective"
    elif op.startswith("p2p::"):
        role = "opaque"
    told = [*getattr(node, "constant_args", ()), *getattr(node, "kwargs", {}).values()] if role != "compute" else []
    group = next((one for one in reversed(told) if isinstance(one, str) and one in groups), None)
    return role, op, group


__all__ = ["names_of_nodes", "read_schedule"]
