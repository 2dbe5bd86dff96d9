"""The passes of torch/_inductor/comms.py, which order the nodes of Inductor's scheduler, and what they are given and return."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar
from unittest import mock

from torch import fx

from tcverify.application.pair import Defect
from tcverify.errors import Unsupported
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.compiling import compile_graph, example_inputs, inductor
from tcverify.pytorch.effects import define_shapes, effects_as
from tcverify.pytorch.end_to_end.pipeline import Code, Pipeline
from tcverify.pytorch.functional import functional_copy
from tcverify.pytorch.schedule_reading import names_of_nodes, read_schedule
from tcverify.pytorch.schedules import NodeSchedule, OrderPromise, Role, defects_of_call, find_rank_disagreement

#: Options that are not settings of Inductor.
_OURS = ("effects", "passes_before", "passes")


def uneven(snode: Any) -> float:
    """A time in milliseconds that follows from the number of a node. Without a GPU, Inductor's own estimates are all 0."""
    return (int("0" + "".join(filter(str.isdigit, snode.get_name()))) * 37 % 11 + 1) * 1e-2


#: The same, for scripts.
_UNEVEN = """\
def uneven(snode):
    \"\"\"A time in milliseconds that follows from the number of a node.\"\"\"
    return (int("0" + "".join(filter(str.isdigit, snode.get_name()))) * 37 % 11 + 1) * 1e-2"""


def told_to_inductor(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are settings of Inductor, `estimate_op_runtime` as a function where it is not Inductor's own."""
    told = {key: value for key, value in options.items() if key not in _OURS}
    return {**told, "estimate_op_runtime": uneven} if told.get("estimate_op_runtime") == "uneven" else told


class ScheduleSeen(BaseException):
    """Ends a compilation whose schedule has been seen. No handler of errors on the way is to see it."""


class CommsPass(TorchPass):
    """A pass on the nodes of Inductor's scheduler, called where `torch.compile` calls it.

    The graph stays as it is: compilation ends behind the pass, whose order of nodes is judged here; see `schedules`.

    Attributes:
        defects: of the last call. That of the last rank names what differs between ranks.
        changed_schedule: whether the last call changed the order of the nodes.
    """

    #: In torch/_inductor/comms.py.
    function: ClassVar[str]
    #: Whose order is compared across ranks.
    compared: ClassVar[tuple[Role, ...]] = ("collective", "opaque")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.defects: list[Defect] = []
        self.changed_schedule = False
        self._given: list[NodeSchedule] = []
        self._made: list[NodeSchedule] = []
        self._groups: list[Mapping[str, Sequence[int]]] = []

    def promise(self, options: Mapping[str, Any]) -> OrderPromise:
        """What the pass promises with these options."""
        return OrderPromise()

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule | None:
        """Compile up to the pass, and judge it."""
        self.defects, self.changed_schedule = [], False
        if gm.meta["rank"] == 0:
            self._given, self._made, self._groups = [], [], []
        seen = self.schedules(gm, options)
        if seen is None:
            return None
        given, units = seen
        self.defects = defects_of_call(given, units, self.promise(options))
        if any(one.aspect == "nodes" for one in self.defects):
            return None
        made = given.in_order_of(units)
        self.changed_schedule = made.steps != given.steps
        self._given.append(given)
        self._made.append(made)
        self._groups.append(gm.meta["groups"])
        reordered = any(d.aspect in ("collective-order", "opaque-order") for d in self.defects)
        if len(self._given) == gm.meta["world_size"] and not reordered:
            found = find_rank_disagreement(self._given, self._made, self._groups, self.compared)
            self.defects += [found] if found is not None else []
        return None

    def schedules(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> tuple[NodeSchedule, list[list[str]]] | None:
        """What the pass is given, and the order in which it returns that; None where it was not called."""
        seen: list[tuple[NodeSchedule, list[list[str]]]] = []
        failed: list[BaseException] = []
        define_shapes()
        module, values = functional_copy(gm), example_inputs(gm)
        with (
            effects_as(options["effects"]),
            inductor(self.settings(options)),
            comms_settings(options),
            self.watched(gm, seen, failed),
        ):
            try:
                compile_graph(module, values)
            except ScheduleSeen:
                pass
            except Exception as error:
                if failed:
                    raise failed[0] from None
                raise Unsupported(f"Inductor does not come as far as its scheduler: {error!r:.200}") from error
        return seen[-1] if seen else None

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        settings = cls.settings(options)
        estimated = settings.get("estimate_op_runtime") is uneven
        if estimated:
            settings["estimate_op_runtime"] = Code(uneven.__name__)
        comms = {name: settings.pop(name) for name in list(settings) if has_setting(name)}
        return Pipeline(
            settings=settings,
            comms=comms,
            ordered=options["effects"] == "ordered",
            definitions=(_UNEVEN,) if estimated else (),
        )

    @classmethod
    def settings(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of Inductor."""
        told = told_to_inductor(options)
        passes = [*options["passes_before"], cls.function]
        return {**told, "reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": passes}

    @contextlib.contextmanager
    def watched(
        self, gm: fx.GraphModule, seen: list[tuple[NodeSchedule, list[list[str]]]], failed: list[BaseException]
    ) -> Iterator[None]:
        """Look at what the pass is given and what it returns, its last call at the end of the compilation."""
        from torch._inductor import comms

        last: Callable[..., Any] = comms.reorder_compute_and_comm_for_overlap
        call = self.judged(gm, seen, failed)

        def finish(snodes: list[Any]) -> list[Any]:
            # `call` is the last of the passes, and may be among the earlier ones.
            last(snodes)
            raise ScheduleSeen

        with (
            mock.patch.object(comms, "print", return_value=None, create=True),  # torch 2.9 says what it estimates
            mock.patch.object(comms, self.function, call),
            mock.patch.object(comms, "reorder_compute_and_comm_for_overlap", finish),
        ):
            yield

    def judged(
        self, gm: fx.GraphModule, seen: list[tuple[NodeSchedule, list[list[str]]]], failed: list[BaseException]
    ) -> Callable[[list[Any]], list[Any]]:
        """The pass, which also says what it was given and what it returned, or how it failed."""
        from torch._inductor import comms

        actual: Callable[..., Any] = getattr(comms, self.function)

        def call(snodes: list[Any]) -> list[Any]:
            given = read_schedule(snodes, gm.meta["groups"])
            try:
                made: list[Any] = actual(snodes)
            except Exception as error:
                failed.append(error)
                raise
            seen.append((given, names_of_nodes(made)))
            return made

        return call


@contextlib.contextmanager
def comms_settings(options: Mapping[str, Any]) -> Iterator[None]:
    """Compile with the settings of `torch._inductor.config_comms` among the options; those it does not have are left out."""
    from torch._inductor import config_comms

    told = {name: value for name, value in options.items() if has_setting(name)}
    patch: Any = config_comms.patch  # type: ignore[attr-defined]
    with patch(told):
        yield


def has_setting(name: str) -> bool:
    """Whether this torch has a setting in `torch._inductor.config_comms`."""
    from torch._inductor import config_comms

    return hasattr(config_comms, name)


class SinkWaits(CommsPass):
    """`sink_waits`: waits come as late as they can."""

    name = "torch:comms.sink_waits"
    function = "sink_waits"


class RaiseComms(CommsPass):
    """`raise_comms`: collectives come as early as they can."""

    name = "torch:comms.raise_comms"
    function = "raise_comms"


class ReorderCompute(CommsPass):
    """`reorder_compute_for_overlap`: compute moves between a collective and its wait."""

    name = "torch:comms.reorder_compute_for_overlap"
    function = "reorder_compute_for_overlap"


class _Iterative(CommsPass):
    """Moves nodes one by one while an estimate of peak memory allows it.

    The budget is a setting since 2.10; before, peak memory must not grow. Both passes say that they keep the order of
    collectives, and have a setting that lets them change it.
    """

    unsafe: ClassVar[str]
    budget: ClassVar[str]

    def promise(self, options: Mapping[str, Any]) -> OrderPromise:
        budget = options[self.budget] if has_setting(self.budget) else 0.0
        keeps = not has_setting(self.unsafe) or not options[self.unsafe]
        return OrderPromise(order=keeps, budget=budget)


class PreservePeakMemory(_Iterative):
    """`reorder_communication_preserving_peak_memory`: collectives come earlier."""

    name = "torch:comms.reorder_communication_preserving_peak_memory"
    function = "reorder_communication_preserving_peak_memory"
    unsafe = "reorder_iterative_unsafe_collectives_reorder"
    budget = "reorder_iterative_peak_memory_budget"


class SinkWaitsIterative(_Iterative):
    """`sink_waits_iterative`: waits come later."""

    name = "torch:comms.sink_waits_iterative"
    function = "sink_waits_iterative"
    unsafe = "sink_waits_iterative_unsafe_collectives_reorder"
    budget = "sink_iterative_peak_memory_budget"


class SimpleOverlap(CommsPass):
    """`simple_overlap`: collectives come earlier and waits later, neighbour by neighbour.

    It runs by default, behind the passes that are listed, and promises that no collective passes another one and that peak
    memory does not grow.
    """

    name = "torch:comms.simple_overlap"
    function = "simple_overlap"

    def promise(self, options: Mapping[str, Any]) -> OrderPromise:
        return OrderPromise(budget=0.0)

    @classmethod
    def settings(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        told = told_to_inductor(options)
        before = list(options["passes_before"])
        return {
            **told,
            "reorder_for_compute_comm_overlap": bool(before),
            "reorder_for_compute_comm_overlap_passes": before,
            "aten_distributed_optimizations.enable_simple_overlap": True,
        }

    @contextlib.contextmanager
    def watched(
        self, gm: fx.GraphModule, seen: list[tuple[NodeSchedule, list[list[str]]]], failed: list[BaseException]
    ) -> Iterator[None]:
        from torch._inductor import comms

        call = self.judged(gm, seen, failed)

        def finish(snodes: list[Any]) -> list[Any]:
            call(snodes)
            raise ScheduleSeen

        with mock.patch.object(comms, self.function, finish):
            yield


__all__ = [
    "CommsPass",
    "PreservePeakMemory",
    "RaiseComms",
    "ReorderCompute",
    "ScheduleSeen",
    "SimpleOverlap",
    "SinkWaits",
    "SinkWaitsIterative",
    "comms_settings",
    "told_to_inductor",
]
