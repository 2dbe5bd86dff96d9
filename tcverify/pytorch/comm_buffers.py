"""`torch._inductor.comm_lowering`: small all_reduces read memory that all ranks map, which Inductor allocates for good.

Generating code for it needs CUDA. What lowering decides is seen without: which buffers become such memory, which all_reduces
become one-shot, and in which order the nodes come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import fx

from tcverify.application.pair import Defect
from tcverify.errors import Unsupported
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.micro_pipeline import symmetric_memory
from tcverify.pytorch.ordering import final_order
from tcverify.pytorch.schedule_reading import names_of_nodes, read_schedule
from tcverify.pytorch.schedules import NodeSchedule, OrderPromise
from tcverify.pytorch.scheduling import CommsPass, told_to_inductor

ONE_SHOT = "symm_mem::one_shot_all_reduce"


class CommLowering(CommsPass):
    """`register_comm_lowerings`, with symmetric memory that is said to be there.

    Judged is, of each rank, that the nodes keep the order that their memory asks for, and that no memory of that kind is
    returned: "Active references to persistent comm buffers are not allowed outside of graphs" (torch/_inductor/graph.py). Of
    all ranks, that they make the same collectives one-shot, which wait for their peers in another way than those of NCCL, that
    they drop the same ones that nobody reads, and that they order them alike; nothing ties one-shot ones to the order of the
    graph. Which kernels reuse such memory in place is decided by generated code, and is not seen.

    Options: `one_shot_all_reduce_threshold_bytes`, up to which size all_reduces become one-shot, and settings of Inductor.
    """

    name = "torch:comm_lowering"
    function = "decide_global_ordering_of_comms"
    compared = ("collective",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._chosen: list[dict[str, list[bool]]] = []
        self._leaked: list[Defect] = []

    def promise(self, options: Mapping[str, Any]) -> OrderPromise:
        return OrderPromise(order=False, opaque="nowhere")

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return replace(
            super().pipeline(options), unreachable="the code that it lowers to needs CUDA and symmetric memory"
        )

    @classmethod
    def settings(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        told = told_to_inductor(options)
        largest = told.pop("one_shot_all_reduce_threshold_bytes")
        return {
            **told,
            "reorder_for_compute_comm_overlap": False,
            "_collective.auto_select": True,
            "_collective.one_shot_all_reduce_threshold_bytes": largest,
        }

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule | None:
        if gm.meta["rank"] == 0:
            self._chosen = []
        self._leaked = []
        with symmetric_memory():
            try:
                super().rewrite(gm, options)
            except Unsupported as error:
                self._require_without(gm, options, error)
                raise
        self.defects += self._leaked[:1]
        if len(self._chosen) == gm.meta["world_size"]:
            kept = [one_shot(given) for given in self._given]
            for found in (
                find_one_shot_mismatch(self._chosen, self._groups),
                find_drop_on_one_rank(self._chosen, kept, self._groups) if len(kept) == len(self._chosen) else None,
            ):
                self.defects += [found] if found is not None else []
        return None

    def _require_without(self, gm: fx.GraphModule, options: Mapping[str, Any], error: Unsupported) -> None:
        """Raise what ended a compilation if the same graph compiles with no all_reduce that is small enough."""
        if error.__cause__ is None:
            return
        if self.schedules(gm, {**options, "one_shot_all_reduce_threshold_bytes": -1}) is not None:
            raise error.__cause__

    @contextlib.contextmanager
    def watched(
        self, gm: fx.GraphModule, seen: list[tuple[NodeSchedule, list[list[str]]]], failed: list[BaseException]
    ) -> Iterator[None]:
        from torch._inductor import comms

        actual = comms.decide_global_ordering_of_comms

        def call(snodes: list[Any], name_to_buf: Any, name_to_fused_node: Any) -> list[Any]:
            given = read_schedule(snodes, gm.meta["groups"])
            self._leaked = find_leaked_buffers(given, comm_buffers(snodes))
            self._chosen.append(one_shot(given))
            seen.append((given, names_of_nodes(snodes)))
            made: list[Any] = actual(snodes, name_to_buf, name_to_fused_node)
            return made

        with mock.patch.object(comms, "decide_global_ordering_of_comms", call), final_order(seen):
            yield


def comm_buffers(snodes: Sequence[Any]) -> set[str]:
    """The names of nodes whose result is in memory that all ranks map."""
    from torch._inductor import ir

    leaves = (leaf for snode in snodes for leaf in snode.get_nodes())
    return {leaf.get_name() for leaf in leaves if isinstance(getattr(leaf.node, "layout", None), ir.CommBufferLayout)}


def find_leaked_buffers(given: NodeSchedule, mapped: Collection[str]) -> list[Defect]:
    """Nodes whose result is in such memory and is returned, or a view of it."""
    message = "{} ({}) writes memory that all ranks map and that lives for good, and it is returned: the next call overwrites it"
    return [
        Defect("comm-buffer", 0, message.format(step.name, step.op), step.name)
        for step in given.steps
        if step.name in mapped and step.writes & given.kept
    ]


def one_shot(given: NodeSchedule) -> dict[str, list[bool]]:
    """Of each group, of each of its collectives in order, whether it is one-shot."""
    found: dict[str, list[bool]] = {}
    for step in given.steps:
        if step.role == "collective" and step.group is not None:
            found.setdefault(step.group, []).append(step.op.startswith(ONE_SHOT))
    return found


def find_one_shot_mismatch(
    chosen: Sequence[Mapping[str, Sequence[bool]]], groups: Sequence[Mapping[str, Collection[int]]]
) -> Defect | None:
    """The first collective that is one-shot on one rank and not on its peer."""
    for rank, named in enumerate(groups):
        for name, members in named.items():
            peer = min(members)
            if peer >= rank:
                continue
            mine, theirs = chosen[rank].get(name, ()), chosen[peer].get(name, ())
            if len(mine) == len(theirs) and list(mine) != list(theirs):
                place = next(n for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
                one, other = (rank, peer) if mine[place] else (peer, rank)
                said = f"collective number {place + 1} on '{name}' is one-shot on rank {one}, and not on rank {other}"
                return Defect("comm-buffer", rank, said)
    return None


def find_drop_on_one_rank(
    chosen: Sequence[Mapping[str, Sequence[bool]]],
    kept: Sequence[Mapping[str, Sequence[bool]]],
    groups: Sequence[Mapping[str, Collection[int]]],
) -> Defect | None:
    """The first group of which a rank drops other unused one-shot collectives than its peer, which then waits for it.

    Args:
        chosen, kept: of each rank, as from `one_shot`, before and after unused nodes are gone.
    """
    for rank, named in enumerate(groups):
        for name, members in named.items():
            peer = min(members)
            mine, theirs = (len(chosen[one].get(name, ())) - len(kept[one].get(name, ())) for one in (rank, peer))
            if mine != theirs:
                said = (
                    f"of group '{name}', rank {rank} drops {mine} one-shot collectives and rank {peer} drops {theirs}"
                )
                return Defect("comm-buffer", rank, f"{said}: the other waits for ever")
    return None


__all__ = [
    "CommLowering",
    "comm_buffers",
    "find_drop_on_one_rank",
    "find_leaked_buffers",
    "find_one_shot_mismatch",
    "one_shot",
]
