"""Comm-buffer lowering on hand-built programs: what becomes of every collective, and what is left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.errors import UsageError
from tcverify.ops import lookup
from tcverify.passes import CommBuffers
from tcverify.program import PARTIAL, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.verification.verifier import verify
from tests.sizes import by_night

TP2 = Mesh.grid({"tp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})
X = InputSpec("x", (4, 8), placements=(("tp", PARTIAL),))
W = InputSpec("w", (8, 8))
Build = Callable[["Builder"], Any]


class Builder:
    """Short names for the calls that these programs are made of."""

    def __init__(self, graph: GraphBuilder) -> None:
        self.graph = graph
        self.x, self.w = graph.input("x"), graph.input("w")

    def call(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call(op if "::" in op else f"_c10d_functional::{op}", *args, **kwargs)

    def made(self, x: fx.Node | None = None) -> fx.Node:
        """Something that this graph computes."""
        return self.call("aten::mm", self.x if x is None else x, self.w)

    def start(self, x: fx.Node, op: str = "sum", group: str = "tp") -> fx.Node:
        return self.call("all_reduce", x, op, group)

    def wait(self, x: fx.Node) -> fx.Node:
        return self.call("wait_tensor", x)

    def relu(self, x: fx.Node) -> fx.Node:
        return self.call("aten::relu", x)

    def add(self, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.call("aten::add.Tensor", x, y)


def program(build: Build, mesh: Mesh = TP2, x: InputSpec = X) -> Program:
    return spmd_program(mesh, [x, W], lambda graph: build(Builder(graph)), seed=3)


def lowered(given: Program, rank: int = 0, **options: Any) -> tuple[fx.GraphModule, CommBuffers]:
    chosen = CommBuffers(**options)
    return chosen(given.graph_module(rank)), chosen


def calls(gm: fx.GraphModule) -> list[str]:
    """Names of the ops that communicate or copy, in order."""
    names = [lookup(n.target).name.split("::")[1] for n in gm.graph.nodes if n.op == "call_function"]
    return [name for name in names if name not in ("mm", "relu", "add.Tensor")]


def buffers(gm: fx.GraphModule) -> dict[str, Any]:
    return {n.name: n.meta["comm_buffer"] for n in gm.graph.nodes if "comm_buffer" in n.meta}


def holds(given: Program, **options: Any) -> None:
    """The verifier refutes nothing, the second application changes nothing, and ranks agree."""
    verdict = verify(CommBuffers(**options), given, deep=True)
    assert verdict.status == "passed", (verdict.findings, verdict.doubts)


# ------------------------------------------------------------------------------------------------------------- forms


def small_sum(b: Builder) -> Any:
    return b.relu(b.wait(b.start(b.made())))


def test_a_small_sum_goes_in_one_shot_and_its_wait_goes() -> None:
    gm, done = lowered(program(small_sum))
    assert calls(gm) == ["one_shot_all_reduce"]
    assert buffers(gm) == {"mm": {"group": "tp", "offset": 0, "nbytes": 128}}
    assert done.rewrites == {
        "one-shot": 1, "in-place": 0, "out-of-place": 0, "contiguous": 0, "dropped-wait": 1, "buffer": 1,
    }  # fmt: skip
    holds(program(small_sum))


@pytest.mark.parametrize(
    "options", [{"symm_mem": "none"}, {"symm_mem": "dp"}, {"one_shot_threshold": 127}, {"one_shot_threshold": "0"}]
)
def test_sums_that_may_not_go_in_one_shot_are_made_in_place(options: Mapping[str, Any]) -> None:
    gm, done = lowered(program(small_sum), **options)
    assert calls(gm) == ["all_reduce_", "wait_tensor"]
    assert done.rewrites["in-place"] == 1
    assert list(buffers(gm)) == ["mm"]
    holds(program(small_sum), **options)


def test_thresholds_and_names_of_groups_are_inclusive() -> None:
    gm, _ = lowered(program(small_sum), one_shot_threshold=128, symm_mem="dp, tp")
    assert calls(gm) == ["one_shot_all_reduce"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_dtypes_that_the_kernel_does_not_take(dtype: torch.dtype) -> None:
    def build(b: Builder) -> Any:
        return b.relu(b.wait(b.start(b.call("aten::_to_copy", b.made(), dtype=dtype))))

    assert calls(lowered(program(build))[0]) == ["_to_copy", "all_reduce_", "wait_tensor"]
    holds(program(build))


def test_another_reduction_is_no_one_shot() -> None:
    def build(b: Builder) -> Any:
        return b.relu(b.wait(b.start(b.made(), "max")))

    assert calls(lowered(program(build))[0]) == ["all_reduce_", "wait_tensor"]
    holds(program(build))


def two_groups_under_way(b: Builder) -> Any:
    first, second = b.start(b.made()), b.start(b.made(b.x), "sum", "dp")
    return b.relu(b.wait(first)), b.relu(b.wait(second))


def test_nothing_blocks_where_another_group_communicates_before_the_wait() -> None:
    gm, done = lowered(program(two_groups_under_way, GRID))
    assert calls(gm) == ["all_reduce_", "one_shot_all_reduce", "wait_tensor"]
    holds(program(two_groups_under_way, GRID))
    unsafe, _ = lowered(program(two_groups_under_way, GRID), unsafe_blocking=True)
    assert calls(unsafe) == ["one_shot_all_reduce", "one_shot_all_reduce"]
    assert done.plan.buffers[0].group == "tp"


def test_what_follows_on_the_same_group_may_be_waited_for_earlier() -> None:
    def build(b: Builder) -> Any:
        first, second = b.start(b.made()), b.start(b.made(b.x))
        return b.relu(b.wait(first)), b.relu(b.wait(second))

    assert calls(lowered(program(build))[0]) == ["one_shot_all_reduce", "one_shot_all_reduce"]
    holds(program(build))


@pytest.mark.parametrize("name", ["barrier", "tensor_cast"])
def test_opaque_and_blocking_communication_counts_too(name: str) -> None:
    def build(b: Builder) -> Any:
        first, other = b.start(b.made()), b.made()
        if name == "barrier":
            b.call("p2p::barrier", "tp")
        else:
            other = b.call("tensor_cast::all_reduce", other, b.graph.rank, b.graph.group("tp"))
        return b.relu(b.wait(first)), b.relu(other)

    found = calls(lowered(program(build))[0])
    assert ("one_shot_all_reduce" in found) == (name == "barrier")  # the barrier is one of the same group
    holds(program(build))


def test_a_sum_in_place_goes_in_one_shot_and_is_copied_back() -> None:
    def build(b: Builder) -> Any:
        x = b.made()
        b.wait(b.call("all_reduce_", x, "sum", "tp"))
        return b.relu(x)

    gm, done = lowered(program(build))
    assert calls(gm) == ["one_shot_all_reduce", "copy_"]
    assert list(buffers(gm)) == ["mm"]
    assert done.rewrites["dropped-wait"] == 1
    holds(program(build))
    gm, _ = lowered(program(build), symm_mem="none")
    assert calls(gm) == ["all_reduce_", "wait_tensor"]
    assert list(buffers(gm)) == ["mm"]


def test_an_input_summed_in_place_stays() -> None:
    def build(b: Builder) -> Any:
        return b.relu(b.wait(b.call("all_reduce_", b.x, "sum", "tp")))

    gm, done = lowered(program(build))
    assert calls(gm) == ["all_reduce_", "wait_tensor"]
    assert not any(done.rewrites.values())


# --------------------------------------------------------------------------------------------- what is still needed


def read_behind(b: Builder) -> Any:
    x = b.made()
    total = b.wait(b.start(x, "avg"))
    return b.add(b.relu(x), b.relu(total))


def read_between(b: Builder) -> Any:
    x = b.made()
    start = b.start(x, "avg")
    return b.add(b.relu(x), b.relu(b.wait(start)))


def written_between(b: Builder) -> Any:
    x = b.made()
    start = b.start(x, "avg")
    b.call("aten::add_.Tensor", x, 1.0)
    return b.add(b.relu(x), b.relu(b.wait(start)))


def read_through_a_view(b: Builder) -> Any:
    x = b.made()
    view = b.call("aten::view", x, [8, 4])
    total = b.wait(b.start(x, "avg"))
    return b.relu(view), b.relu(total)


def read_by_another_that_is_under_way(b: Builder) -> Any:
    x = b.made()
    first = b.start(x, "max")
    total = b.wait(b.start(x, "avg"))
    return b.relu(total), b.relu(b.wait(first))


def an_input(b: Builder) -> Any:
    return b.relu(b.wait(b.start(b.x, "avg")))


def an_output(b: Builder) -> Any:
    x = b.made()
    return x, b.relu(b.wait(b.start(x, "avg")))


def part_of_a_storage(b: Builder) -> Any:
    part = b.call("aten::slice.Tensor", b.made(), 0, 0, 2)
    return b.relu(b.wait(b.start(part, "avg")))


def transposed(b: Builder) -> Any:
    return b.relu(b.wait(b.start(b.call("aten::t", b.made()), "avg")))


def one_of_two_results(b: Builder) -> Any:
    gain = b.call("aten::mean.dim", b.w, [0])
    pair = b.call("tensor_cast::add_rms_norm2", b.x, b.made(), gain, 1e-6)
    return b.relu(b.wait(b.start(b.graph.getitem(pair, 0), "avg"))), b.relu(b.graph.getitem(pair, 1))


NEEDED: dict[str, Build] = {
    f.__name__.replace("_", " "): f
    for f in (
        read_behind, read_between, written_between, read_through_a_view, read_by_another_that_is_under_way, an_input, an_output,
        part_of_a_storage, transposed, one_of_two_results,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_a_value_that_is_needed_or_cannot_be_placed_is_copied(name: str) -> None:
    gm, done = lowered(program(NEEDED[name]))
    clones = [n for n in gm.graph.nodes if n.op == "call_function" and lookup(n.target).name == "aten::clone"]
    assert clones
    assert done.rewrites["out-of-place"] >= 1
    assert {clone.name for clone in clones} <= buffers(gm).keys()
    assert all(clone.meta["val"].is_contiguous() for clone in clones)
    holds(program(NEEDED[name]))


@pytest.mark.parametrize("name", NEEDED)
def test_copies_can_be_forbidden(name: str) -> None:
    gm, done = lowered(program(NEEDED[name]), out_of_place="functional")
    assert "clone" not in calls(gm)
    assert not done.rewrites["out-of-place"]
    holds(program(NEEDED[name]), out_of_place="functional")


def test_an_input_is_copied_into_a_buffer_for_one_shot() -> None:
    def build(b: Builder) -> Any:
        return b.relu(b.wait(b.start(b.x)))

    gm, _ = lowered(program(build))
    assert calls(gm) == ["clone", "one_shot_all_reduce"]
    holds(program(build))


@pytest.mark.parametrize("view", [False, True])
def test_a_result_that_is_an_output_lives_in_no_buffer(view: bool) -> None:
    def build(b: Builder) -> Any:
        total = b.wait(b.start(b.made(), "avg"))
        return b.call("aten::view", total, [-1]) if view else total

    gm, _ = lowered(program(build))
    assert calls(gm)[:2] == ["all_reduce", "wait_tensor"]
    assert list(buffers(gm)) == ["mm"]
    holds(program(build))


def test_sums_of_sums_stay_in_one_buffer() -> None:
    def build(b: Builder) -> Any:
        total = b.wait(b.start(b.made(), "avg"))
        return b.relu(b.wait(b.start(b.call("aten::view", total, [8, 4]), "max")))

    gm, done = lowered(program(build))
    assert done.rewrites["in-place"] == 2
    assert list(buffers(gm)) == ["mm"]
    assert done.plan.buffers[0].collectives == ("all_reduce", "all_reduce_1")
    storages = {
        n.meta["val"].untyped_storage()._cdata for n in gm.graph.nodes if "all_reduce" in n.name or n.name == "mm"
    }
    assert len(storages) == 1
    holds(program(build))


def test_a_buffer_belongs_to_one_group() -> None:
    def build(b: Builder) -> Any:
        total = b.wait(b.start(b.made(), "avg"))
        return b.relu(b.wait(b.start(total, "max", "dp")))

    gm, done = lowered(program(build, GRID))
    assert (done.rewrites["in-place"], done.rewrites["out-of-place"]) == (1, 1)
    assert {place["group"] for place in buffers(gm).values()} == {"tp", "dp"}
    holds(program(build, GRID))


# ------------------------------------------------------------------------------------------------- other collectives


def collective(name: str, b: Builder, x: fx.Node) -> fx.Node:
    half = b.graph.shape(x)[0] // 2
    rest: dict[str, tuple[Any, ...]] = {
        "all_gather_into_tensor": (2, "tp"),
        "reduce_scatter_tensor": ("sum", 2, "tp"),
        "all_to_all_single": ([half, half], [half, half], "tp"),
        "broadcast": (0, "tp"),
        "broadcast_": (0, "tp"),
        "all_reduce_coalesced": ("sum", "tp"),
        "all_reduce_coalesced_": ("sum", "tp"),
        "all_gather_into_tensor_coalesced": (2, "tp"),
        "reduce_scatter_tensor_coalesced": ("max", 2, "tp"),
    }
    if "coalesced" not in name:
        return b.wait(b.call(name, x, *rest[name]))
    return b.wait(b.graph.getitem(b.call(name, [x], *rest[name]), 0))


OTHERS = (
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast", "broadcast_",
    "all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_operands_of_other_collectives_live_in_buffers(name: str) -> None:
    def build(b: Builder) -> Any:
        return b.relu(collective(name, b, b.made()))

    gm, done = lowered(program(build))
    assert buffers(gm) == {"mm": {"group": "tp", "offset": 0, "nbytes": 128}}
    assert {key: count for key, count in done.rewrites.items() if count} == {"buffer": 1}
    holds(program(build))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", ["broadcast", "all_reduce_coalesced"])
def test_what_is_written_while_a_copy_of_it_is_in_flight_lives_in_no_buffer(name: str, early: bool) -> None:
    """In a buffer there would be no copy. Behind the wait a write is harmless."""

    def build(b: Builder) -> Any:
        x = b.made()
        start = b.call("broadcast", x, 1, "tp") if name == "broadcast" else b.call(name, [x], "max", "tp")
        own = start if name == "broadcast" else b.graph.getitem(start, 0)
        if early:
            b.call("aten::add_.Tensor", x, 1.0)
        total = b.wait(own)
        if not early:
            b.call("aten::add_.Tensor", x, 1.0)
        return b.relu(total), b.relu(x)

    gm, _ = lowered(program(build))
    assert bool(buffers(gm)) != early
    holds(program(build))


@pytest.mark.parametrize("name", [name for name in OTHERS if not name.endswith("_")])
def test_operands_that_are_not_row_by_row_are_copied(name: str) -> None:
    def build(b: Builder) -> Any:
        square = b.call("aten::mm", b.call("aten::t", b.made()), b.made())
        return b.relu(collective(name, b, b.call("aten::t", square)))

    gm, done = lowered(program(build))
    assert done.rewrites["contiguous"] == 1
    assert "clone_default" in buffers(gm)
    holds(program(build))


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "broadcast", "all_reduce_coalesced"])
def test_inputs_and_outputs_are_no_buffers(name: str) -> None:
    def build(b: Builder) -> Any:
        x = b.made()
        return b.relu(collective(name, b, b.x)), x, b.relu(collective(name, b, x))

    gm, done = lowered(program(build))
    assert not any(done.rewrites.values())
    assert not buffers(gm)


def test_an_operand_of_two_groups_lives_in_a_buffer_of_the_first() -> None:
    def build(b: Builder) -> Any:
        x = b.made()
        tp, dp = b.call("all_gather_into_tensor", x, 2, "tp"), b.call("all_gather_into_tensor", x, 2, "dp")
        return b.relu(b.wait(tp)), b.relu(b.wait(dp))

    gm, _ = lowered(program(build, GRID))
    assert [place["group"] for place in buffers(gm).values()] == ["tp"]
    holds(program(build, GRID))


# -------------------------------------------------------------------------------------------------------------- waits


def test_waits_with_several_users_and_several_waits() -> None:
    def build(b: Builder) -> Any:
        start = b.start(b.made())
        first, second = b.wait(start), b.wait(start)
        third = b.wait(first)
        return b.relu(first), b.call("aten::view", second, [-1]), b.add(third, first)

    gm, done = lowered(program(build))
    assert calls(gm) == ["one_shot_all_reduce", "view"]
    assert done.rewrites["dropped-wait"] == 3
    holds(program(build))


def test_a_wait_for_two_stays_as_long_as_one_needs_it() -> None:
    def build(b: Builder) -> Any:
        total = b.wait(b.start(b.made()))
        again = b.wait(b.call("all_reduce_", total, "max", "tp"))
        return b.relu(again)

    gm, done = lowered(program(build))
    assert done.rewrites["dropped-wait"] == 1
    assert calls(gm) == ["one_shot_all_reduce", "all_reduce_", "wait_tensor"]
    holds(program(build))


def test_declared_orders_name_what_stands_for_a_wait() -> None:
    def build(b: Builder) -> Any:
        total = b.wait(b.start(b.made()))
        later = b.relu(b.x)
        later.meta["after"] = [total.name]
        return b.relu(total), later

    gm, _ = lowered(program(build))
    after = [n.meta["after"] for n in gm.graph.nodes if "after" in n.meta]
    assert after == [["all_reduce"]]
    holds(program(build))


# ------------------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("alignment", 0), ("alignment", "many"), ("one_shot_threshold", -1), ("out_of_place", "maybe"),
        ("symm_mem", "tp,,dp"), ("reuse", "perhaps"), ("nonsense", 1),
    ],
)  # fmt: skip
def test_options_are_checked(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"option {option}|no option '{option}'"):
        CommBuffers(**{option: value})


def test_options_come_as_text() -> None:
    done = CommBuffers(alignment="512", reuse="false", symm_mem="tp", one_shot_threshold="64", unsafe_blocking="true")
    assert (done.alignment, done.reuse, done.choices.one_shot_threshold) == (512, False, 64)


def test_a_second_application_changes_nothing() -> None:
    for build in (small_sum, *NEEDED.values()):
        gm, done = lowered(program(build))
        first = str(gm.graph), buffers(gm)
        done(gm)
        assert not any(done.rewrites.values())
        assert (str(gm.graph), buffers(gm)) == first


def test_another_plan_replaces_the_old_one() -> None:
    def build(b: Builder) -> Any:
        return b.relu(b.wait(b.start(b.relu(b.wait(b.start(b.made()))))))

    gm, done = lowered(program(build))
    assert [place["offset"] for place in buffers(gm).values()] == [0, 0]
    again = CommBuffers(reuse=False)
    again(gm)
    assert [place["offset"] for place in buffers(gm).values()] == [0, 256]
    assert {key for key, count in again.rewrites.items() if count} == {"buffer"}
    assert done.plan.reuses


def test_long_chains_take_linear_time() -> None:
    length = by_night(1500, 500)

    def build(b: Builder) -> Any:
        x = b.made()
        for _ in range(length):
            x = b.relu(b.wait(b.start(x, "avg")))
        starts = [b.start(x, "max") for _ in range(length // 3)]
        return [b.relu(b.wait(start)) for start in starts]

    given = program(build)
    before = time.perf_counter()
    _, done = lowered(given)
    assert time.perf_counter() - before < length / 75
    assert done.rewrites["in-place"] == length
