"""Comm-buffer lowering: operands of collectives are placed in registered communication buffers at fixed offsets.

Communication libraries can read and write the memory of peers if it is registered with them, so that nothing is
copied on the way. That needs all ranks of a group to use the same allocation, at the same offset, for the same collective, in
every iteration.

1. Every all_reduce takes the form that suits its operand: in one shot, in place, or in place on a copy (`lowering`).
2. Operands of collectives that can live in a buffer do (`lowering.Lowering.fits`): what an op of this graph makes in a storage
   of its own, of known size and row by row, that is no output and shares no storage with one, or a view of all of it. Operands
   that are not row by row are copied. What libraries allocate (results of collectives, what custom ops receive) cannot.
3. The buffers get their places (`plan`), and the nodes that make them `meta["comm_buffer"]`: group, offset and bytes.

The members of a group must agree on all of it: on forms, buffers and places. A rank that sees only its own graph knows what the
others do only if they run the same one, up to numbers. If all do, the program says so (`gm.meta["alike"]` names these groups).
Collectives of other groups are left unchanged, and their operands are in no buffer. Numbers may still differ between
ranks, so views of a part of a storage do not count as fit: where the part lies could be one of them.

Also left unchanged are collectives over groups of one rank; those without a wait; those that conflict with a collective in
flight; those whose metadata is missing, symbolic or not what the operands imply; and graphs that are lowered to streams.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import fx

from tcverify.errors import UsageError
from tcverify.passes.base import Pass
from tcverify.passes.comm_buffers.lowering import (
    BUFFERED,
    Choices,
    Lowering,
    is_whole,
    may_be_placed,
    operands,
)
from tcverify.passes.comm_buffers.plan import BufferPlan, BufferRequest, plan_buffers
from tcverify.passes.comm_buffers.storages import Analysis, Storage, analyse, group_of, operation
from tcverify.passes.overlap.reordering import is_lowered
from tcverify.program import Contract

log = logging.getLogger(__name__)

KEY = "comm_buffer"


class CommBuffers(Pass):
    """Places operands of collectives in communication buffers, and chooses the matching forms of all_reduce.

    Patterns: `one-shot`, `in-place` and `out-of-place` (in place on a copy) count all_reduces, `dropped-wait` waits with nothing
    left to wait for, `contiguous` operands that are copied row by row, `buffer` buffers that have been given a place or lost it.

    Args:
        symm_mem: names of the groups for which symmetric memory is enabled, separated by commas, or "all" or "none".
        one_shot_threshold: most bytes that are summed in one shot.
        out_of_place: what an all_reduce becomes that cannot be done in place: "clone" (in place on a copy) or "functional" (it
            stays).
        alignment: of which offsets are multiples, in bytes.
        reuse: whether buffers that are never needed at the same time share a place.
        unsafe_alike: UNSAFE where ranks run different graphs: takes the members of all groups to run this one, whatever the
            program says. Forms and places may then differ between ranks.
        unsafe_blocking: UNSAFE where ranks start collectives of several groups in different orders: sums in one shot also where
            other groups communicate between start and wait. Ranks may then wait for each other forever.
        options: those of `Pass`.

    Attributes:
        plan: of the last call; `str(plan)` is a table.
    """

    name = "comm_buffers"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, collective_order=True)
    PATTERNS: ClassVar[tuple[str, ...]] = (
        "one-shot", "in-place", "out-of-place", "contiguous", "dropped-wait", "buffer",
    )  # fmt: skip

    #: How graphs are rewritten.
    lowering: ClassVar[type[Lowering]] = Lowering

    def __init__(
        self,
        *,
        symm_mem: str | Iterable[str] = "all",
        one_shot_threshold: int | str = 128 * 1024,
        out_of_place: str = "clone",
        alignment: int | str = 256,
        reuse: bool | str = True,
        unsafe_alike: bool | str = False,
        unsafe_blocking: bool | str = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        names = symm_mem.split(",") if isinstance(symm_mem, str) else symm_mem
        names = (
            [name.strip() if isinstance(name, str) else "" for name in names] if isinstance(names, Iterable) else [""]
        )
        self.symm_mem = frozenset(names)
        if not all(self.symm_mem):
            raise UsageError(
                f"option symm_mem of pass '{self.name}' cannot be {symm_mem!r}", "name groups, or use all or none"
            )
        if out_of_place not in ("clone", "functional"):
            raise UsageError(
                f"option out_of_place of pass '{self.name}' cannot be {out_of_place!r}", "use clone or functional"
            )
        self.alignment = self._whole_number("alignment", alignment, 1)
        self.reuse = self._boolean("reuse", reuse)
        self.unsafe_alike = self._boolean("unsafe_alike", unsafe_alike)
        self.choices = Choices(
            self._enabled_for,
            self._whole_number("one_shot_threshold", one_shot_threshold, 0),
            out_of_place,
            self._boolean("unsafe_blocking", unsafe_blocking),
        )
        self.plan = BufferPlan()
        self.all_agree = False
        self._alone: frozenset[str] = frozenset()
        self._groups: frozenset[str] | None = frozenset()

    def _enabled_for(self, group: str) -> bool:
        return "all" in self.symm_mem or group in self.symm_mem

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Lower `gm` in place, or leave it alone. See `Pass.__call__`."""
        given = gm.meta.get("groups")
        sizes = {name: len(ranks) for name, ranks in given.items()} if isinstance(given, Mapping) else {}
        alike = gm.meta.get("alike", ())
        self._alone = frozenset(name for name, size in sizes.items() if size < 2)
        self._groups = None if self.unsafe_alike else frozenset(alike)
        self.all_agree = self._groups is None or self._groups.issuperset(sizes)
        self.plan = BufferPlan()
        return super().__call__(gm)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Choose the forms, then the places. See `Pass.rewrite`."""
        if is_lowered(graph):  # what stands first there need not run first
            log.info("%s leaves a graph alone: it is lowered to streams", self.name)
            return []
        found = analyse(graph)
        if not found.flights and not any(KEY in node.meta for node in graph.nodes):
            return []
        self.lowering(graph, found, self.choices, self.agrees, self.rewrites).run()
        found = analyse(graph)
        self.plan = plan_buffers(self.wanted(graph, found), self.alignment, reuse=self.reuse)
        self._annotate(graph)
        return []

    def agrees(self, group: str) -> bool:
        """Whether the members of a group are several, and come to the same decisions."""
        return group not in self._alone and (self._groups is None or group in self._groups)

    def wanted(self, graph: fx.Graph, found: Analysis) -> list[BufferRequest]:
        """What lives in a buffer, in the order of the collectives that use it first."""
        users: dict[Storage, list[tuple[str, str]]] = {}
        elsewhere: set[Storage] = set()  # what is sent to ranks that may have no buffer for it
        for node in graph.nodes:
            op = operation(node)
            group = group_of(node)
            if op is None or not op.collective or op.phase == "wait":
                continue
            if not self.all_agree and (group is None or not self.agrees(group)):
                elsewhere.update(storage for x in node.all_input_nodes for storage in found.held(x))
            if op.name not in BUFFERED or group is None or not self.agrees(group):
                continue
            for x in operands(node):
                spec, storage = found.spec(x), found.storage(x)
                if spec is None or storage is None or x in found.misdescribed:
                    continue
                if may_be_placed(storage) and is_whole(spec, storage):
                    users.setdefault(storage, []).append((group, node.name))
        return [
            BufferRequest(
                storage.owner.name, calls[0][0], storage.nbytes, storage.birth, storage.death,
                tuple(dict.fromkeys(name for _, name in calls)),
            )
            for storage, calls in users.items()
            if storage.owner is not None and storage not in elsewhere
        ]  # fmt: skip

    def _annotate(self, graph: fx.Graph) -> None:
        places = {b.node: {"group": b.group, "offset": b.offset, "nbytes": b.nbytes} for b in self.plan.buffers}
        for node in graph.nodes:
            place = places.get(node.name)
            if node.meta.get(KEY) == place:
                continue
            if place is None:
                del node.meta[KEY]
            else:
                node.meta[KEY] = place
            self.rewrites["buffer"] += 1


__all__ = ["KEY", "CommBuffers"]
