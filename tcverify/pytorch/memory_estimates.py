"""`torch._inductor.fx_passes.memory_estimator`: what passes believe to be allocated, against what is when the graph runs.

Kernels run on the CPU, as a rank of groups whose collectives do nothing, and the storages that live are counted. The estimator
counts devices other than the CPU, so that values say they are on a GPU while it looks at them.
"""

from __future__ import annotations

import contextlib
import heapq
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
        require_functional(gm)
        gm.graph.eliminate_dead_code(_must_run)
        order = _reordered(gm.graph, options["order"])
        copies: dict[fx.Node, fx.Node] = {}
        made = fx.GraphModule(gm, _copied(gm.graph, order, copies))
        releasable = _kept_inputs if options["inputs"] == "kept" else _always
        alive = count_alive(made, releasable)
        estimates = self.wrong(gm, made, copies, releasable, alive, options)
        self.defects = [one for one in estimates if one is not None][:1]
        return made

    def wrong(
        self, gm: fx.GraphModule, made: fx.GraphModule, copies: Mapping[fx.Node, fx.Node], releasable: Releasable,
        alive: Sequence[int], options: Mapping[str, Any],
    ) -> list[Defect | None]:  # fmt: skip
        """What is wrong with the estimates.

        Args:
            gm, made: the graph before it was reordered, and after.
            copies: of nodes, in the new order.
            alive: what is to be estimated; see `count_alive`.
        """
        raise NotImplementedError


class MemoryEstimator(_Reordered):
    """`build_memory_profile`, which sees the new graph, and `MemoryTracker`, which sees the old one and is told the new order.

    Options:
        aliases: which values share storage: as when the graph "run"s, or as the fake kernels of "torch" say.
    """

    name = "torch:memory_estimator"

    def wrong(
        self, gm: fx.GraphModule, made: fx.GraphModule, copies: Mapping[fx.Node, fx.Node], releasable: Releasable,
        alive: Sequence[int], options: Mapping[str, Any],
    ) -> list[Defect | None]:  # fmt: skip
        from torch._inductor.fx_passes import memory_estimator as estimator

        calls = [node for node in copies if node.op == "call_function"]
        names = [copies[node].name for node in calls]
        with torch_metadata(made) if options["aliases"] == "torch" else contextlib.nullcontext(), on_gpu(made.graph):
            for node, copy in copies.items():
                node.meta["val"] = copy.meta.get("val")
            profile = estimator.build_memory_profile(made.graph, releasable)
            tracker = estimator.MemoryTracker(gm.graph, releasable)
            tracked = [tracker.current_memory_bytes]
            for node in calls:
                tracker.schedule_node(node)
                tracked.append(tracker.current_memory_bytes)
        return [
            find_wrong_estimate("build_memory_profile", profile, alive, [name for name in names for _ in range(2)]),
            find_wrong_estimate("MemoryTracker", tracked, alive[::2], names),
            find_wrong_estimate("MemoryTracker, as the peak,", [tracker.peak_memory], [max(alive)], []),
        ]


class MemTracked(_Reordered):
    """`torch.distributed._tools.MemTracker`, which watches the graph run.

    Options:
        fake: whether it runs on fake tensors.
    """

    name = "torch:mem_tracker"

    def wrong(
        self, gm: fx.GraphModule, made: fx.GraphModule, copies: Mapping[fx.Node, fx.Node], releasable: Releasable,
        alive: Sequence[int], options: Mapping[str, Any],
    ) -> list[Defect | None]:  # fmt: skip
        from torch.distributed._tools.mem_tracker import MemTracker

        names = [node.name for node in made.graph.nodes if node.op == "call_function"]
        with FakeTensorMode(allow_non_fake_inputs=True) if options["fake"] else contextlib.nullcontext():
            tracker = MemTracker()
            with tracker:
                tracked = count_alive(made, releasable, lambda _: _total(tracker, "current"))
            peak = _total(tracker, "peak")
        return [
            find_wrong_estimate("MemTracker", tracked, alive, [name for name in names for _ in range(2)]),
            find_wrong_estimate("MemTracker, as the peak,", [peak], [max(alive)], []),
        ]


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
        names: of the nodes; the first place is before all of them.
    """
    places = itertools.zip_longest(estimated, alive, [None, *names])
    for said, true, name in places:
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
    """Whether a node has an effect, or communicates: it is no dead code, and keeps its place among its like."""
    if node.op != "call_function":
        return True
    op = lookup(node.target)
    return bool(node.is_impure() or op.collective or op.effect)


def _reordered(graph: fx.Graph, order: str) -> list[fx.Node]:
    """The calls of a graph in another order, which computes the same."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    keys = {node: _key(order, place) for place, node in enumerate(calls)}
    before = _predecessors(calls)
    behind: dict[fx.Node, list[fx.Node]] = {node: [] for node in calls}
    for node, earlier in before.items():
        for one in earlier:
            behind[one].append(node)
    missing = {node: len(earlier) for node, earlier in before.items()}
    ready = [(keys[node], place) for place, node in enumerate(calls) if not missing[node]]
    places = {node: place for place, node in enumerate(calls)}
    heapq.heapify(ready)
    found = []
    while ready:
        node = calls[heapq.heappop(ready)[1]]
        found.append(node)
        for one in behind[node]:
            missing[one] -= 1
            if not missing[one]:
                heapq.heappush(ready, (keys[one], places[one]))
    return found


def _key(order: str, place: int) -> int:
    return {"given": place, "latest": -place, "mixed": place * 37 % 11}[order]


def _predecessors(calls: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """What has to stay before each call: what it reads, the wait for a storage that it touches, and what has effects."""
    found: dict[fx.Node, set[fx.Node]] = {}
    waits: dict[int, fx.Node] = {}
    fixed: list[fx.Node] = []
    for node in calls:
        storages = set(_storages(node.all_input_nodes))
        earlier = {one for one in node.all_input_nodes if one.op == "call_function"}
        earlier |= {waits[one] for one in storages if one in waits}
        if lookup(node.target).phase == "wait":
            waits.update(dict.fromkeys(storages, node))
        if _must_run(node) and lookup(node.target).phase != "wait":
            earlier.update(found if node.target is torch.ops.aten.copy_.default else fixed[-1:])
            fixed.append(node)
        found[node] = earlier
    return found


def _storages(nodes: Iterable[fx.Node]) -> list[int]:
    values = pytree.tree_leaves([node.meta.get("val") for node in nodes])
    return [one.untyped_storage()._cdata for one in values if isinstance(one, torch.Tensor)]


def _copied(graph: fx.Graph, order: Sequence[fx.Node], copies: dict[fx.Node, fx.Node]) -> fx.Graph:
    made = fx.Graph()
    inputs = [node for node in graph.nodes if node.op in _INPUTS]
    for node in (*inputs, *order, graph.output_node()):
        copies[node] = made.node_copy(node, copies.__getitem__)
    return made


__all__ = ["MemTracked", "MemoryEstimator", "count_alive", "find_wrong_estimate"]
