"""`torch._inductor.fx_passes.memory_estimator`: what passes believe to be allocated, against what is when the graph runs.

Kernels run on the CPU, as a rank of groups whose collectives do nothing, and the storages that live are counted. The estimator
counts devices other than the CPU, so that values say they are on a GPU while it looks at them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tcverify.application.pair import Defect
from tcverify.errors import Unsupported
from tcverify.ops import lookup, resolve
from tcverify.passes.overlap.graph import comm_graph
from tcverify.passes.overlap.list_schedule import list_schedule
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.compat import on_gpu
from tcverify.pytorch.functional_graphs import require_functional, torch_metadata

#: Whether what a node allocates is freed some time.
Releasable = Callable[[fx.Node], bool]

#: How many bytes are alive together with the values of nodes.
Count = Callable[[Mapping[fx.Node, Any]], int]

_INPUTS = ("placeholder", "get_attr")


class _Reordered(TorchPass):
    """Puts a graph in another order, as overlap scheduling does, and has its memory estimated in that order.

    Options:
        order: "given"; of the nodes that may run next, the "latest" or a "mixed" choice.
        inputs: whether they are "kept", as the caller does, or "released" behind their last use.

    Attributes:
        defects: where an estimate is wrong, of the last graph.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.defects: list[Defect] = []

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        require_functional(gm.graph)
        given = fx.GraphModule(gm, _copied(gm.graph, gm.graph.nodes, {}))
        given.graph.eliminate_dead_code(_must_run)
        places = {node: place for place, node in enumerate(given.graph.nodes)}
        order = list_schedule(
            comm_graph(given.graph, gm.meta["groups"]), lambda node: _key(options["order"], places[node])
        )
        copies: dict[fx.Node, fx.Node] = {}
        made = fx.GraphModule(gm, _copied(given.graph, order, copies))
        releasable = _kept_inputs if options["inputs"] == "kept" else _always
        alive = count_alive(made, releasable)
        names = [node.name for node in made.graph.nodes if node.op == "call_function"]
        estimates = self.estimate(made, copies, releasable, options)
        found = [find_wrong_estimate(what, counts, alive, names) for what, counts in estimates.items()]
        self.defects = [one for one in found if one is not None][:1]
        return made

    def estimate(
        self, gm: fx.GraphModule, copies: Mapping[fx.Node, fx.Node], releasable: Releasable, options: Mapping[str, Any]
    ) -> Mapping[str, Sequence[int]]:
        """What torch counts, by what counts it: as `count_alive` does, or without the counts while nodes run, or the peak alone.

        Args:
            gm: the graph in the new order.
            copies: its nodes by those of the old graph, in the new order.
        """
        raise NotImplementedError


class MemoryEstimator(_Reordered):
    """`build_memory_profile`, which sees the new graph, and `MemoryTracker`, which sees the old one and is told the new order.

    Options:
        aliases: which values share storage: as when the graph "run"s, or as the fake kernels of "torch" say.
    """

    name = "torch:memory_estimator"

    def estimate(
        self, gm: fx.GraphModule, copies: Mapping[fx.Node, fx.Node], releasable: Releasable, options: Mapping[str, Any]
    ) -> Mapping[str, Sequence[int]]:
        from torch._inductor.fx_passes import memory_estimator as estimator

        with torch_metadata(gm) if options["aliases"] == "torch" else contextlib.nullcontext(), on_gpu(gm.graph):
            for node, copy in copies.items():
                node.meta["val"] = copy.meta.get("val")
            tracker = estimator.MemoryTracker(next(iter(copies)).graph, releasable)
            tracked = [tracker.current_memory_bytes]
            for node in copies:
                if node.op == "call_function":
                    tracker.schedule_node(node)
                    tracked.append(tracker.current_memory_bytes)
            return {
                "build_memory_profile": estimator.build_memory_profile(gm.graph, releasable),
                "MemoryTracker": tracked,
                "MemoryTracker, as the peak,": [tracker.peak_memory],
            }


class MemTracked(_Reordered):
    """`torch.distributed._tools.MemTracker`, which watches the graph run.

    Options:
        fake: whether it runs on fake tensors.
    """

    name = "torch:mem_tracker"

    def estimate(
        self, gm: fx.GraphModule, copies: Mapping[fx.Node, fx.Node], releasable: Releasable, options: Mapping[str, Any]
    ) -> Mapping[str, Sequence[int]]:
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        with FakeTensorMode(allow_non_fake_inputs=True) if options["fake"] else contextlib.nullcontext(), tracker:
            tracked = count_alive(gm, releasable, lambda _: _total(tracker, "current"))
        return {"MemTracker": tracked, "MemTracker, as the peak,": [_total(tracker, "peak")]}


def _total(tracker: Any, when: str) -> int:
    return sum(one["Total"] for one in tracker.get_tracker_snapshot(when).values())


def _kept_inputs(node: fx.Node) -> bool:
    return node.op not in _INPUTS


def _always(_: fx.Node) -> bool:
    return True


def find_wrong_estimate(
    what: str, estimated: Sequence[int], alive: Sequence[int], names: Sequence[str]
) -> Defect | None:
    """The first place at which an estimate is not what is alive.

    Args:
        estimated: for the same places as `alive`, or without those at which nodes run, or the peak alone.
        alive: see `count_alive`.
        names: of the calls.
    """
    places: list[str | None] = [None, *(name for name in names for _ in range(2))]
    if len(estimated) == 1 + len(names):
        alive, places = alive[::2], [None, *names]
    elif len(estimated) == 1:
        alive, places = [max(alive)], [None]
    for said, true, name in itertools.zip_longest(estimated, alive, places):
        if said != true:
            where = "" if name is None else f" at '{name}'"
            return Defect("estimate", 0, f"{what} counts {said} bytes{where}, where {true} are alive", name)
    return None


# ------------------------------------------------------------------------------------------------------------- counting


def count_alive(gm: fx.GraphModule, releasable: Releasable, count: Count | None = None) -> list[int]:
    """Run a graph; return the bytes that are alive before it, and for each call while it runs and after it.

    A value lives until its last user has run. What an asynchronous collective reads counts as dead behind its last user too:
    PyTorch knows that it lives until the wait, and leaves it out (pull request 164839).

    Args:
        count: counts the bytes of values; else each storage counts once.

    Raises:
        Unsupported: the graph does not run.
    """
    count = count or _bytes
    values: dict[fx.Node, Any] = {}
    unread = Counter(one for node in gm.graph.nodes for one in node.all_input_nodes)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = pytree.tree_map_only(torch.Tensor, _zeros, node.meta["val"])
        elif node.op == "get_attr":
            values[node] = getattr(gm, str(node.target))
    found = [count(values)]
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        values[node] = _run(node, values)
        found.append(count(values))
        unread.subtract(node.all_input_nodes)
        for one in (node, *node.all_input_nodes):
            if not unread[one] and (one.op not in _INPUTS or releasable(one)):
                values.pop(one)
        found.append(count(values))
    return found


def _zeros(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()


def _run(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        made = node.target(*args, **kwargs)  # type: ignore[operator]
        if lookup(node.target).phase == "start":  # c10d warns of those that nobody waits for
            for one in pytree.tree_leaves(made):
                resolve("_c10d_functional::wait_tensor")(one)
    except Exception as error:
        raise Unsupported(
            f"node '{node.name}' does not run by itself: {type(error).__name__}: {error}"[:200]
        ) from error
    return made


def _bytes(values: Mapping[fx.Node, Any]) -> int:
    """The size of all storages of values, each counted once."""
    tensors = (one for one in pytree.tree_leaves(list(values.values())) if isinstance(one, torch.Tensor))
    storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())


# ------------------------------------------------------------------------------------------------------------- ordering


def _must_run(node: fx.Node) -> bool:
    """Whether a node is no dead code even if nothing reads it."""
    if node.op != "call_function":
        return True
    op = lookup(node.target)
    return bool(node.is_impure() or op.collective or op.effect)


def _key(order: str, place: int) -> tuple[int, ...]:
    """Of the nodes that may run next, the one with the least key does."""
    return ({"given": place, "latest": -place, "mixed": place * 37 % 11}[order],)


def _copied(graph: fx.Graph, order: Iterable[fx.Node], copies: dict[fx.Node, fx.Node]) -> fx.Graph:
    made = fx.Graph()
    for node in order:
        copies[node] = made.node_copy(node, copies.__getitem__)
    return made


__all__ = ["MemTracked", "MemoryEstimator", "count_alive", "find_wrong_estimate"]
