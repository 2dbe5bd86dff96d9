"""Estimates of memory: what is counted is alive, torch agrees on sound programs, and planted defects of it are refuted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import verify
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch import SUBJECTS
from tcverify.pytorch.compat import on_gpu
from tcverify.pytorch.groups import fake_groups
from tcverify.pytorch.memory_estimates import MemoryEstimator, MemTracked, count_alive

MESH = Mesh.grid({"dp": 2})
DRAWS = SUBJECTS["memory_estimator"].draws

pytestmark = pytest.mark.skipif(
    not SUBJECTS["memory_estimator"].here,
    reason=f"torch {torch.__version__} has no {SUBJECTS['memory_estimator'].source}",
)


def layers(b: GraphBuilder) -> Any:
    """Two gathered weights, products, a view, the halves of a tensor, and an input that nothing reads."""
    x, first, second, _ = b.input("x"), b.input("first"), b.input("second"), b.input("unread")
    for part in (first, second):
        started = b.call("_c10d_functional::all_gather_into_tensor", part, 2, "dp")
        x = b.call("aten::mm", x, b.call("_c10d_functional::wait_tensor", started))
    turned = b.call("aten::t", x)
    left, right = (b.call("python::getitem", b.call("aten::split.Tensor", turned, 2), n) for n in (0, 1))
    return b.call("aten::add.Tensor", left, right), b.call("aten::sum", b.call("aten::mul.Tensor", left, left))


def program(build: Callable[[GraphBuilder], Any] = layers, **options: Any) -> Program:
    inputs = [
        InputSpec("x", (4, 4)),
        InputSpec("unread", (4, 4)),
        *(InputSpec(name, (2, 4), placements=(("dp", VARYING),)) for name in ("first", "second")),
    ]
    return replace(spmd_program(MESH, inputs, build), options=options)


def messages(one: Program) -> list[str]:
    return [finding.detail for finding in verify(MemoryEstimator(), one).findings]


def always(_: fx.Node) -> bool:
    return True


def never(_: fx.Node) -> bool:
    return False


def alive(build: Callable[[GraphBuilder], Any], releasable: Callable[[fx.Node], bool] = always) -> list[int]:
    one = program(build)
    with fake_groups(0, 2, {"dp": (0, 1)}):
        return count_alive(fx.GraphModule(torch.nn.Module(), one.graph(0)), releasable)


# ---------------------------------------------------------------------------------------------------- what is counted


def test_a_value_lives_until_its_last_reader_has_run_and_a_result_to_the_end() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")  # 64 bytes
        double = b.call("aten::add.Tensor", x, x)
        total = b.call("aten::sum", double)  # 4 bytes
        return total, b.call("aten::mul.Tensor", double, double)

    assert alive(build) == [64, 128, 64, 68, 68, 132, 68]
    assert alive(build, lambda node: node.op != "placeholder") == [64, 128, 128, 132, 132, 196, 132]


def test_views_waits_and_parts_of_a_tuple_count_once() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        reduced = b.call("_c10d_functional::all_reduce", x, "sum", "dp")
        parts = b.call("aten::split.Tensor", b.call("_c10d_functional::wait_tensor", reduced), 2)
        return b.call("aten::t", b.call("python::getitem", parts, 1))

    assert set(alive(build, never)) == {64, 128}


def test_a_result_that_nothing_reads_is_freed_at_once_and_an_input_never() -> None:
    graph = fx.Graph()
    x, unread = graph.placeholder("x"), graph.placeholder("unread")
    graph.call_function(torch.ops.aten.neg.default, (x,))
    graph.output(graph.call_function(torch.ops.aten.sum.default, (x,)))
    for node in (x, unread):
        node.meta["val"] = torch.empty(4, 4)
    assert count_alive(fx.GraphModule(torch.nn.Module(), graph), always) == [128, 192, 128, 132, 68]


# ------------------------------------------------------------------------------------------------------ sound programs


@pytest.mark.parametrize("order", DRAWS["order"])
@pytest.mark.parametrize("inputs", DRAWS["inputs"])
def test_estimates_are_what_is_alive(order: str, inputs: str) -> None:
    verdict = verify(MemoryEstimator(), program(order=order, inputs=inputs, aliases="run"))
    assert verdict.status == "passed", [finding.detail for finding in verdict.findings]
    assert verdict.pair.changed == (order != "given")


def test_a_copy_into_an_input_stays_last() -> None:
    def build(b: GraphBuilder) -> Any:
        x, y = b.input("x"), b.input("unread")
        total = b.call("aten::add.Tensor", x, y)
        b.call("aten::copy_", y, total)
        return b.call("aten::sum", total)

    def reordered(b: GraphBuilder) -> Any:
        x, y = b.input("x"), b.input("unread")
        total = b.call("aten::add.Tensor", x, y)
        result = b.call("aten::mul.Tensor", y, y)
        b.call("aten::copy_", y, total)
        return result

    for order in DRAWS["order"]:
        assert verify(MemoryEstimator(), program(reordered, order=order, aliases="run")).status == "passed"
    assert verify(MemoryEstimator(), program(build)).status == "inconclusive"  # it reads behind the copy


def test_a_reader_of_a_start_stays_behind_the_wait() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        started = b.call("_c10d_functional::all_reduce", x, "sum", "dp")
        waited = b.call("_c10d_functional::wait_tensor", started)
        return b.call("aten::mul.Tensor", started, started), b.call("aten::neg", waited)

    for order in DRAWS["order"]:
        assert verify(MemoryEstimator(), program(build, order=order, aliases="run")).status == "passed"


def test_fake_kernels_count_what_is_waited_for_twice() -> None:
    (message,) = messages(program(aliases="torch"))
    assert message == "build_memory_profile counts 320 bytes at 'wait_tensor', where 256 are alive"


def test_a_graph_that_does_not_run_is_inconclusive() -> None:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        return b.call("aten::linalg_cholesky", b.call("aten::mm", b.call("aten::t", x), x))  # of zeros there is none

    verdict = verify(MemoryEstimator(), program(build))
    assert verdict.status == "inconclusive"
    assert "does not run by itself" in str(verdict.pair.declined)


# ----------------------------------------------------------------------------------------------------- planted defects


def planted(name: str) -> tuple[Any, str, Any]:
    """A mistake of the estimator: the class that makes it, the method, and what takes its place."""
    from torch._inductor.fx_passes import memory_estimator as estimator

    aliases, tracker = estimator.GraphAliasTracker, estimator.MemoryTracker
    outputs, freed, update = (
        aliases._get_output_storages,
        tracker._get_storages_freed_by_node,
        tracker._update_memory_for_node,
    )
    last = aliases.get_storages_last_used

    def view_is_new(node: fx.Node) -> Any:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor) and node.target is torch.ops.aten.t.default:
            value = torch.empty_like(value)
            return type(outputs(node))([estimator.StorageKey(value.untyped_storage(), value.device)])
        return outputs(node)

    def counts_more(self: Any, node: fx.Node) -> None:
        update(self, node)
        self.current_memory_bytes += 1

    defects: dict[str, tuple[Any, str, Any]] = {
        "views are new storages": (aliases, "_get_output_storages", staticmethod(view_is_new)),
        "nothing is freed in profiles": (aliases, "get_storages_last_used", lambda self, node: []),
        "inputs are never freed in profiles": (
            aliases,
            "get_storages_last_used",
            lambda self, node: [one for one in last(self, node) if self.storage_to_allocator[one].op != "placeholder"],
        ),
        "nothing is freed while tracking": (tracker, "_get_storages_freed_by_node", lambda self, node: []),
        "tracking frees by the given order": (
            tracker,
            "_get_storages_freed_by_node",
            lambda self, node: self.alias_tracker.get_storages_last_used(node) & freed(self, node),
        ),
        "tracking adds up wrongly": (tracker, "_update_memory_for_node", counts_more),
    }
    return defects[name]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("views are new storages", "build_memory_profile"),
        ("nothing is freed in profiles", "build_memory_profile"),
        ("inputs are never freed in profiles", "build_memory_profile"),
        ("nothing is freed while tracking", "MemoryTracker"),
        ("tracking frees by the given order", "MemoryTracker"),
        ("tracking adds up wrongly", "MemoryTracker"),
    ],
)
def test_a_wrong_estimate_is_refuted(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*planted(name))
    found = messages(program(order="latest", inputs="released", aliases="run"))
    assert found, name
    assert found[0].startswith(what)


def test_the_order_decides_whether_a_tracker_that_frees_by_the_given_one_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(*planted("tracking frees by the given order"))
    assert not messages(program(order="given", inputs="released", aliases="run"))


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != "2.13.0", reason="other versions of torch were not looked at"
)
def test_the_peak_of_a_training_step_cannot_be_estimated_at_all() -> None:
    """docs/pytorch.md says so. Once it can be, it needs a subject."""
    from torch._inductor.fx_passes.memory_estimator import get_peak_memory

    graph = program().graph(0)
    with on_gpu(graph), pytest.raises(TypeError, match="not subscriptable"):
        get_peak_memory(graph, graph)


# ---------------------------------------------------------------------------------------------------------- MemTracker


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("order", DRAWS["order"])
def test_mem_tracker_counts_what_is_alive(order: str, fake: bool) -> None:
    verdict = verify(MemTracked(), program(order=order, inputs="released", fake=fake))
    assert verdict.status == "passed", [finding.detail for finding in verdict.findings]


def test_a_mem_tracker_that_is_wrong_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed._tools import mem_tracker

    one = program(inputs="released")
    with monkeypatch.context() as patched:  # what dies stays
        patched.setattr(mem_tracker.MemTracker, "_delete_callback", lambda *_: None)
        (finding,) = verify(MemTracked(), one).findings
        assert finding.detail == "MemTracker counts 256 bytes at 'all_gather_into_tensor', where 224 are alive"
    with monkeypatch.context() as patched:  # elements in place of bytes
        patched.setattr(mem_tracker._WeakRefInfo, "_calculate_mem_consumed", lambda self: self.size // 4)
        (finding,) = verify(MemTracked(), one).findings
        assert finding.detail == "MemTracker counts 48 bytes, where 192 are alive"
    with monkeypatch.context() as patched:
        patched.setattr(mem_tracker.MemTracker, "_update_peak_stats", lambda *_: None)
        (finding,) = verify(MemTracked(), one).findings
        assert finding.detail.startswith("MemTracker, as the peak, counts 0 bytes")
