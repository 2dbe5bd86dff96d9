"""Comm-buffer lowering: operands of collectives live in registered communication buffers, which are always at the same place.

Libraries for communication can read and write the memory of peers where it has been registered with them, so that nothing is
copied on the way. That needs all ranks of a group to use the same allocation, at the same offset, for the same collective, in
every iteration.

1. Every all_reduce takes the form that suits its operand: in one shot, in place, or in place on a copy (`lowering`).
2. Operands of collectives that can live in a buffer do (`lowering.Lowering.fits`): what an op of this graph makes in a storage
   of its own, of known size and row by row, that is no output and shares no storage with one, or a view of all of it. Operands
   that are not row by row are copied. What libraries allocate (results of collectives, what custom ops receive) cannot.
3. The buffers get their places (`plan`), and the nodes that make them `meta["comm_buffer"]`: group, offset and bytes.

What ranks must agree on: members of a group issue the same collectives with equal sizes in the same order; that is all that the
plan counts on, unless the program says that all its ranks run one graph (`gm.meta["alike"]`). So operands of all_to_all, whose
sizes may differ between ranks, stay outside (option `all_to_all`), and so do views of a part of a storage, whose size may differ
where shards are uneven.

Left alone are collectives over groups of one rank; those that nobody waits for; those that read or write what is still under
way; and those whose metadata is missing, symbolic or not what the operands imply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import fx

from tcverify.errors import UsageError
from tcverify.passes.base import Pass
from tcverify.passes.comm_buffers.lowering import (
    ALL_REDUCE,
    ALL_TO_ALL,
    AS_THEY_ARE,
    OUT_OF_PLACE,
    Choices,
    Lowering,
    is_whole,
    operands,
)
from tcverify.passes.comm_buffers.plan import BufferPlan, Wanted, plan_buffers
from tcverify.passes.comm_buffers.storages import Analysis, Storage, analyse, group_of, nbytes, operation
from tcverify.program import Contract

KEY = "comm_buffer"


class CommBuffers(Pass):
    """Lets operands of collectives live in communication buffers, and chooses the forms of all_reduce that suit them.

    Patterns: `one-shot`, `in-place` and `out-of-place` (in place on a copy) count all_reduces, `dropped-wait` waits that nothing
    is left for, `contiguous` operands that are copied row by row, `buffer` buffers that have been given a place or lost it.

    Args:
        symm_mem: names of the groups for which symmetric memory is enabled, separated by commas, or "all" or "none".
        one_shot_threshold: most bytes that are summed in one shot.
        out_of_place: what an all_reduce becomes that cannot be done in place: "clone" (in place on a copy) or "functional" (it
            stays).
        alignment: of which offsets are multiples, in bytes.
        reuse: whether buffers that are never needed at the same time share a place, where all ranks run one graph.
        all_to_all: UNSAFE where ranks send different amounts: lets operands of all_to_all live in buffers too.
        unsafe_alike: UNSAFE where ranks run different graphs: takes all of them to run this one though the program does not say
            so. Places then differ between ranks.
        unsafe_blocking: UNSAFE where ranks start collectives of several groups in different orders: sums in one shot also where
            other groups communicate between start and wait. Ranks may then wait for each other for ever.
        options: those of `Pass`.

    Attributes:
        plan: of the last call; `str(plan)` is a table.
    """

    name = "comm_buffers"
    contract: ClassVar[Contract] = Contract(idempotent=True, collective_order=True)
    PATTERNS: ClassVar[tuple[str, ...]] = (
        "one-shot", "in-place", "out-of-place", "contiguous", "dropped-wait", "buffer",
    )  # fmt: skip

    lowering: ClassVar[type[Lowering]] = Lowering

    def __init__(
        self,
        *,
        symm_mem: str | Iterable[str] = "all",
        one_shot_threshold: int | str = 128 * 1024,
        out_of_place: str = "clone",
        alignment: int | str = 256,
        reuse: bool | str = True,
        all_to_all: bool | str = False,
        unsafe_alike: bool | str = False,
        unsafe_blocking: bool | str = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        names = symm_mem.split(",") if isinstance(symm_mem, str) else symm_mem
        self.symm_mem = frozenset(name.strip() for name in names)
        if not all(self.symm_mem):
            raise UsageError(
                f"option symm_mem of pass '{self.name}' cannot be {symm_mem!r}", "name groups, or use all or none"
            )
        if out_of_place not in ("clone", "functional"):
            raise UsageError(
                f"option out_of_place of pass '{self.name}' cannot be {out_of_place!r}", "use clone or functional"
            )
        self.alignment = self._number("alignment", alignment, 1)
        self.reuse = self._boolean("reuse", reuse)
        self.unsafe_alike = self._boolean("unsafe_alike", unsafe_alike)
        self.choices = Choices(
            self._enabled_for,
            self._number("one_shot_threshold", one_shot_threshold, 0),
            out_of_place,
            self._boolean("unsafe_blocking", unsafe_blocking),
            self._boolean("all_to_all", all_to_all),
        )
        self.plan = BufferPlan()
        self._sizes: dict[str, int] = {}
        self._alike = False

    def _number(self, option: str, value: object, least: int) -> int:
        try:
            number = int(str(value))
        except ValueError:
            number = least - 1
        if number < least:
            raise UsageError(
                f"option {option} of pass '{self.name}' cannot be {value!r}", f"use a whole number of at least {least}"
            )
        return number

    def _enabled_for(self, group: str) -> bool:
        return "all" in self.symm_mem or group in self.symm_mem

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Lower `gm` in place, or leave it alone. See `Pass.__call__`."""
        groups = gm.meta.get("groups")
        self._sizes = {name: len(ranks) for name, ranks in groups.items()} if isinstance(groups, Mapping) else {}
        self._alike = self.unsafe_alike or gm.meta.get("alike") is True
        self.plan = BufferPlan()
        return super().__call__(gm)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Choose the forms, then the places. See `Pass.rewrite`."""
        found = self.analysed(graph)
        if not found.flights and not any(KEY in node.meta for node in graph.nodes):
            return []
        self.lowering(graph, found, self.choices, self._sizes, self.rewrites).run()
        found = self.analysed(graph)
        wanted = self._wanted(graph, found)
        self.plan = plan_buffers(wanted, self._sizes, self.alignment, alike=self._alike, reuse=self.reuse)
        self._annotate(graph)
        return []

    def _wanted(self, graph: fx.Graph, found: Analysis) -> list[Wanted]:
        """What could live in a buffer, in the order of the collectives, and what other ranks may have one for."""
        users: dict[Storage, list[tuple[str, str]]] = {}
        order: list[tuple[Storage | None, str, int]] = []
        unknown: set[str] = set()
        for node in graph.nodes:
            group = self._group(node)
            if group is None:
                continue
            for x in operands(node):
                spec, storage = found.spec(x), found.storage(x)
                if spec is None or storage is None:
                    unknown.add(group)  # what follows on this group cannot be placed: its sizes add up
                    continue
                if group in unknown:
                    continue
                fits = self.lowering.placeable(storage) and is_whole(spec, storage) and x not in found.misdescribed
                order.append((storage if fits else None, group, nbytes(spec)))
                users.setdefault(storage, []).append((group, node.name))
        wanted: list[Wanted] = []
        known: set[Storage] = set()
        for storage, group, size in order:
            calls = users[storage] if storage is not None else []
            shared = len({g for g, _ in calls}) > 1  # by collectives of groups whose members need not agree on a place
            if storage is None or storage in known or (shared and not self._alike):
                wanted.append(Wanted(None, group, size, 0, 0, ()))
                continue
            known.add(storage)
            names = tuple(dict.fromkeys(name for _, name in calls))
            wanted.append(Wanted(storage.owner, group, size, storage.birth, self.needed_until(storage), names))
        return wanted

    def analysed(self, graph: fx.Graph) -> Analysis:
        """The storages of a graph."""
        return analyse(graph)

    def needed_until(self, storage: Storage) -> int:
        """The last position at which a storage is needed."""
        return storage.death

    def _group(self, node: fx.Node) -> str | None:
        """The group over which a node communicates from what may be buffers; None for what has none."""
        op = operation(node)
        name = op.name if op is not None else ""
        known = name in OUT_OF_PLACE or name in AS_THEY_ARE or name == ALL_REDUCE
        if not known and not (name == ALL_TO_ALL and self.choices.all_to_all):
            return None
        group = group_of(node)
        return group if group is not None and self._sizes.get(group, 2) > 1 else None

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
