"""How Inductor's scheduler comes to the order of its nodes: what is given to it, what it must keep, and what it makes of that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from torch import fx

from tcverify.application.pair import Defect
from tcverify.pytorch.schedule_reading import names_of_nodes, read_schedule
from tcverify.pytorch.schedules import NodeSchedule, OrderPromise
from tcverify.pytorch.scheduling import CommsPass, ScheduleSeen, told_to_inductor


class DecideOrdering(CommsPass):
    """`decide_global_ordering_of_comms`: every collective gets a dependency on the one before it.

    Judged are the dependencies, and what becomes of the order of operations in the scheduler as a whole: behind fusion, the pass
    for peak memory and the passes for overlap, as code would be generated. That of collectives is to be the order of the
    graph. Of opaque communication PyTorch orders what is registered as ordered, and that among itself.
    """

    name = "torch:comms.decide_global_ordering_of_comms"
    function = "decide_global_ordering_of_comms"
    compared = ("collective",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._unchained: Defect | None = None

    def promise(self, options: Mapping[str, Any]) -> OrderPromise:
        return OrderPromise(opaque="among its own" if options["effects"] == "ordered" else "nowhere")

    @classmethod
    def settings(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        told = told_to_inductor(options)
        passes = list(options["passes"])
        return {
            **told,
            "reorder_for_compute_comm_overlap": bool(passes),
            "reorder_for_compute_comm_overlap_passes": passes,
        }

    @contextlib.contextmanager
    def watched(
        self, gm: fx.GraphModule, seen: list[tuple[NodeSchedule, list[list[str]]]], failed: list[BaseException]
    ) -> Iterator[None]:
        from torch._inductor import comms

        actual: Callable[..., Any] = getattr(comms, self.function)

        def call(snodes: list[Any], name_to_buf: Any, name_to_fused_node: Any) -> list[Any]:
            given = read_schedule(snodes, gm.meta["groups"])
            try:
                made: list[Any] = actual(snodes, name_to_buf, name_to_fused_node)
            except Exception as error:
                failed.append(error)
                raise
            self._unchained = find_unchained(given, made)
            seen.append((given, names_of_nodes(made)))
            return made

        with mock.patch.object(comms, self.function, call), final_order(seen):
            yield

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule | None:
        self._unchained = None
        super().rewrite(gm, options)
        if self._unchained is not None and not self.defects:
            self.defects = [self._unchained]
        return None


@contextlib.contextmanager
def final_order(seen: list[tuple[NodeSchedule, list[list[str]]]]) -> Iterator[None]:
    """End compilations when the order of nodes is final, and use it in place of the last observed order.

    Unused nodes that only compute are gone by then.
    """
    from torch._inductor.scheduler import Scheduler

    def finish(scheduler: Any) -> None:
        if seen:
            given, _ = seen[-1]
            units = names_of_nodes(scheduler.nodes)
            seen[-1] = given.only({name for unit in units for name in unit}), units
        raise ScheduleSeen

    with mock.patch.object(Scheduler, "process_grouped_nodes", finish):
        yield


def find_unchained(given: NodeSchedule, snodes: Sequence[Any]) -> Defect | None:
    """The first collective that does not depend on the one before it, be it by way of others."""
    needs: dict[str, set[str]] = {}
    makes: dict[str, str] = {}
    for snode in snodes:
        for leaf in snode.get_nodes():
            makes.update((str(buffer.get_name()), str(leaf.get_name())) for buffer in leaf.get_outputs())
            needs[leaf.get_name()] = {dep.name for dep in leaf.read_writes.reads}
    last: str | None = None
    for step in given.steps:
        if step.role != "collective":
            continue
        if last is not None and last not in _behind(step.name, needs, makes):
            message = f"{step.name} ({step.op}) does not depend on {last}, the collective before it"
            return Defect("collective-order", 0, message, step.name)
        last = step.name
    return None


def _behind(name: str, needs: Mapping[str, set[str]], makes: Mapping[str, str]) -> set[str]:
    """The nodes on which one depends."""
    found: set[str] = set()
    ahead = [name]
    while ahead:
        for buffer in needs.get(ahead.pop(), ()):
            maker = makes.get(buffer)
            if maker is not None and maker not in found:
                found.add(maker)
                ahead.append(maker)
    return found


__all__ = ["DecideOrdering", "final_order", "find_unchained"]
