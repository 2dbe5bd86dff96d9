"""The check of memory: peaks, explicit frees, and communication buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from tcverify.application import Pair
from tcverify.checks import Evidence
from tcverify.checks.memory.liveness import lives_of, peak_of
from tcverify.checks.memory.memory import check_memory, in_bytes
from tcverify.checks.ordering.accesses import accesses_of
from tcverify.program import Contract, InputSpec, Program
from tcverify.program.finding import KINDS, Doubt, Finding
from tests.support.async_programs import DP2, Functional, edited, judge, kinds, moved, program, reordered

TILE = 4 * 4 * 4  # bytes of the inputs, and of most values

Edit = Callable[[fx.Graph, dict[str, fx.Node]], Any]


def found(original: Program, rewritten: Program, **promises: Any) -> Finding:
    (finding,) = judge("memory", original, rewritten, **promises)
    assert finding.kind in KINDS
    return finding


def spans(made: Program) -> dict[str, list[tuple[str, str, int]]]:
    """When the values of rank 0 live: value → (first node, last node, bytes)."""
    accesses = accesses_of(made, 0)
    names = [step.name for step in accesses.steps]
    result: dict[str, list[tuple[str, str, int]]] = {}
    for life in lives_of(accesses):
        result.setdefault(accesses.value(life.storage), []).append((names[life.first], names[life.last], life.nbytes))
    return result


# ------------------------------------------------------------------------------------------------------------- liveness


def test_values_live_until_they_are_touched_last() -> None:
    def build(b: Functional) -> Any:
        product = b.mm(b.x)
        view = b.call("aten::view", product, [16])
        other = b.mm(b.x)
        total = b.call("aten::sum", view)
        return b.add(other, total)

    assert spans(program(build)) == {
        "x": [("x", "output", TILE)],
        "y": [("x", "output", TILE)],
        "mm": [("mm", "sum_1", TILE)],
        "mm_1": [("mm_1", "add", TILE)],
        "sum_1": [("sum_1", "add", 4)],
        "add": [("add", "output", TILE)],
    }


def test_what_a_start_reads_lives_until_the_wait() -> None:
    def build(b: Functional) -> Any:
        operand = b.relu(b.x)
        exchanged, reduced = b.start(operand, kind="all_to_all_single"), b.start(b.relu(operand))
        product = b.mm(b.x)
        waited = b.wait(exchanged)
        return b.add(waited, product), b.wait(reduced)

    made = spans(program(build))
    assert made["relu"] == [("relu", "wait_tensor", TILE)]
    assert made["all_to_all_single"] == [("all_to_all_single", "add", TILE)]
    assert made["relu_1"] == [("relu_1", "all_reduce", TILE)]  # which works on a copy


def test_what_nobody_waits_for_is_read_to_the_end() -> None:
    def build(b: Functional) -> Any:
        b.start(b.relu(b.x), kind="all_to_all_single")
        return b.mm(b.x)

    assert spans(program(build))["relu"] == [("relu", "output", TILE)]


def resize(b: Functional, value: fx.Node, nbytes: int) -> fx.Node:
    return b.call("inductor::resize_storage_bytes_", value, nbytes)


def test_explicit_frees_end_a_life_and_allocations_begin_another() -> None:
    def build(b: Functional) -> Any:
        value = b.relu(b.x)
        resize(b, value, 0)
        product = b.mm(b.x)
        resize(b, value, TILE)
        b.call("fsdp::copy_", value, product)
        resize(b, b.x, 0)
        return b.mm(value)

    made = spans(program(build))
    assert made["relu"] == [("relu", "resize_storage_bytes_", TILE), ("resize_storage_bytes__1", "mm_1", TILE)]
    assert made["x"] == [("x", "resize_storage_bytes__2", TILE)]


# ---------------------------------------------------------------------------------------------------------------- peaks


def branches(b: Functional) -> Any:
    """Two wide values, each reduced to a small one before the next is made."""
    parts = []
    for _ in range(2):
        wide = b.call("aten::repeat", b.x, [8, 1])
        parts.append(b.call("aten::sum", wide))
    return b.add(parts[0], parts[1])


WIDE = 8 * TILE


def test_a_peak_above_the_promise() -> None:
    original = program(branches)
    assert peak_of(accesses_of(original, 0)).nbytes == 2 * TILE + WIDE + 2 * 4
    raised = moved(original, "repeat_1", before="sum_1")
    finding = found(original, raised, memory_budget=0.0)
    assert (finding.kind, finding.node, finding.rank) == ("peak-memory", "sum_1", 0)
    assert finding.title == "peak memory is 1156 bytes (1.129 KiB) at 'sum_1', 648 bytes before the pass"
    assert "the pass promises not to let it grow" in finding.detail
    assert "'repeat' 512 bytes, 'repeat_1' 512 bytes" in finding.detail
    assert (finding.data["before_bytes"], finding.data["after_bytes"]) == (648, 1156)
    assert kinds("memory", original, raised) == []
    assert kinds("memory", original, raised, memory_budget=0.79) == []
    assert kinds("memory", original, raised, memory_budget=0.78) == ["peak-memory"]
    assert kinds("memory", raised, original, memory_budget=0.0) == []


def test_a_wait_that_sinks_holds_operands_for_longer() -> None:
    def build(b: Functional) -> Any:
        wide = b.call("aten::repeat", b.x, [8, 1])
        waited = b.wait(b.call("_c10d_functional::all_to_all_single", wide, [16, 16], [16, 16], "dp"))
        small = b.call("aten::sum", waited)
        other = b.call("aten::repeat", b.y, [8, 1])
        return small, b.call("aten::sum", other)

    original = program(build)
    sunk = reordered(original, ["repeat", "all_to_all_single", "repeat_1", "sum_2", "wait_tensor", "sum_1"])
    assert found(original, sunk, memory_budget=0.2).kind == "peak-memory"


def test_values_of_unknown_size_are_a_doubt_where_a_promise_needs_them() -> None:
    original = program(branches)
    unknown = edited(original, lambda graph, nodes: nodes["x"].meta.pop("val"))
    evidence = Evidence(Pair(original, unknown, changed=True), Contract(memory_budget=0.0))
    (doubt,) = check_memory(evidence)
    assert isinstance(doubt, Doubt)
    assert "the size of 'x' is unknown" in doubt.detail
    assert kinds("memory", original, unknown) == []


def test_sizes_in_words() -> None:
    assert [in_bytes(n) for n in (0, 1023, 2048, 3 << 20)] == [
        "0 bytes", "1023 bytes", "2048 bytes (2 KiB)", "3145728 bytes (3 MiB)",
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- frees


def freeing(b: Functional) -> Any:
    value = b.relu(b.x)
    product = b.mm(value)
    resize(b, value, 0)
    return product


def test_use_after_free() -> None:
    original = program(freeing)
    assert kinds("memory", original, original) == []
    finding = found(original, moved(original, "resize_storage_bytes_", before="mm"))
    assert (finding.kind, finding.node) == ("use-after-free", "mm")
    assert finding.title == "'mm' reads 'relu' after 'resize_storage_bytes_' has freed it"


def test_a_collective_that_reads_what_is_freed_under_it() -> None:
    def build(b: Functional) -> Any:
        value = b.relu(b.x)
        waited = b.wait(b.start(value, kind="all_to_all_single"))
        resize(b, value, 0)
        return waited

    original = program(build)
    early = moved(original, "resize_storage_bytes_", before="wait_tensor")
    (finding,) = judge("order", original, early)
    assert finding.title == "'resize_storage_bytes_' frees 'relu' while 'all_to_all_single' may still read it"
    assert kinds("memory", original, early) == []


def test_a_double_free() -> None:
    original = program(freeing)

    def twice(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        free = nodes["resize_storage_bytes_"]
        with graph.inserting_after(free):
            graph.call_function(free.target, free.args).meta["val"] = None

    rewritten = edited(original, twice)
    finding = found(original, rewritten)
    assert (finding.kind, finding.node) == ("double-free", "resize_storage_bytes__default")
    assert kinds("memory", rewritten, rewritten) == []


@pytest.mark.parametrize(("name", "kind"), [("x", "freed-input"), ("mm", "freed-output"), ("relu", None)])
def test_what_may_be_freed(name: str, kind: str | None) -> None:
    def build(b: Functional) -> Any:
        return b.mm(b.relu(b.x))

    original = program(build)

    def free(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        target = program(freeing).graphs[0]
        op = next(node.target for node in target.nodes if "resize" in node.name)
        with graph.inserting_before(nodes["output"]):
            graph.call_function(op, (nodes[name], 0)).meta["val"] = None

    rewritten = edited(original, free)
    assert kinds("memory", original, rewritten) == ([kind] if kind is not None else [])
    assert kinds("memory", rewritten, rewritten) == []
    if name == "x":
        assert kinds("memory", rewritten, original) == ["leak"]


def test_a_leak() -> None:
    original = program(freeing)
    rewritten = edited(original, lambda graph, nodes: graph.erase_node(nodes["resize_storage_bytes_"]))
    finding = found(original, rewritten)
    assert (finding.kind, finding.node) == ("leak", "relu")
    assert finding.title == "'relu' is never freed; in the original, 'resize_storage_bytes_' frees it"


def test_a_parameter_that_is_no_longer_filled_is_no_leak() -> None:
    def build(b: Functional) -> Any:
        full = b.wait(b.start(b.y))
        resize(b, b.x, TILE)
        b.call("fsdp::copy_", b.x, full)
        product = b.mm(b.x)
        resize(b, b.x, 0)
        return product

    original = program(build)

    def drop(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        nodes["mm"].update_arg(0, nodes["wait_tensor"])
        for name in ("copy_", "resize_storage_bytes_", "resize_storage_bytes__1"):
            graph.erase_node(nodes[name])

    assert kinds("memory", original, edited(original, drop)) == []
    kept = edited(original, lambda graph, nodes: graph.erase_node(nodes["resize_storage_bytes__1"]))
    assert kinds("memory", original, kept) == ["leak"]


# -------------------------------------------------------------------------------------------------------------- buffers


def buffered(places: dict[str, Any]) -> Edit:
    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        for name, place in places.items():
            nodes[name].meta["comm_buffer"] = place

    return edit


def place(offset: int, nbytes: int = TILE) -> dict[str, Any]:
    return {"group": "dp", "offset": offset, "nbytes": nbytes}


def two_reductions(b: Functional) -> Any:
    first = b.relu(b.x)
    started = b.start(first)
    second = b.relu(b.y)
    other = b.start(second)
    total = b.add(b.wait(started), b.x)
    return b.add(total, b.wait(other))


def test_buffers_of_values_that_live_at_the_same_time() -> None:
    original = program(two_reductions)
    finding = found(original, edited(original, buffered({"relu": place(0), "relu_1": place(32)})))
    assert (finding.kind, finding.node) == ("overlapping-buffers", "relu_1")
    assert finding.title == "'relu_1' overlaps 'relu', which is still live, in the communication buffers"
    assert "'relu' has bytes 0 to 64 until 'wait_tensor'" in finding.detail
    assert finding.data["ranges"] == [[0, 64], [32, 96]]
    assert kinds("memory", original, edited(original, buffered({"relu": place(0), "relu_1": place(64)}))) == []
    # in this order the first has arrived when the second is made
    serial = reordered(
        original, ["relu", "all_reduce", "wait_tensor", "add", "relu_1", "all_reduce_1", "wait_tensor_1", "add_1"]
    )
    assert kinds("memory", serial, edited(serial, buffered({"relu": place(0), "relu_1": place(0)}))) == []


def test_many_buffers_are_compared_with_their_neighbours() -> None:
    def build(b: Functional) -> Any:
        values = [b.relu(b.x) for _ in range(40)]
        return [b.wait(started) for started in [b.start(value) for value in values]]

    original = program(build)
    names = [f"relu_{i}" if i else "relu" for i in range(40)]
    disjoint = {name: place(((7 * i) % 40) * TILE) for i, name in enumerate(names)}
    assert kinds("memory", original, edited(original, buffered(disjoint))) == []
    for name in names[1::7]:
        for shift in (-1, 1):
            moved_by_one = {**disjoint, name: place(max(1, disjoint[name]["offset"] + shift))}
            if 0 < disjoint[name]["offset"] < 39 * TILE:
                assert kinds("memory", original, edited(original, buffered(moved_by_one))) == ["overlapping-buffers"]


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"relu": place(0, TILE - 4)}, "has 60 bytes, and its value needs 64"),
        ({"x": place(0)}, "its storage is that of input 'x'"),
        ({"add_1": place(0)}, "is returned: the next call overwrites it"),
        ({"relu": {"group": "dp", "offset": -4, "nbytes": TILE}}, "is malformed"),
        ({"relu": "here"}, "is malformed"),
    ],
)
def test_buffers_that_cannot_be(places: dict[str, Any], words: str) -> None:
    original = program(two_reductions)
    rewritten = edited(original, buffered(places))
    finding = found(original, rewritten)
    assert finding.kind == "buffer-mismatch"
    assert finding.node in places
    assert words in finding.title
    again = edited(original, buffered(places))
    assert kinds("memory", rewritten, again) == []  # it was so before


def test_buffers_are_at_the_same_place_on_all_ranks_of_a_group() -> None:
    def build(b: Functional) -> Any:
        return b.wait(b.start(b.relu(b.x)))

    original = program(build, build, mesh=DP2, inputs=[InputSpec("x", (4, 4)), InputSpec("y", (4, 4))])
    offsets = iter((0, 256))

    def apart(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        nodes["relu"].meta["comm_buffer"] = place(next(offsets))

    rewritten = edited(original, apart)
    finding = found(original, rewritten)
    assert (finding.kind, finding.rank) == ("buffer-mismatch", 1)
    assert "on rank 1 are not those on rank 0" in finding.title
    assert "rank 0: 'all_reduce' bytes 0 to 64" in finding.detail
    assert kinds("memory", original, edited(original, buffered({"relu": place(0)}))) == []


@pytest.mark.parametrize(
    ("op", "found"), [("_c10d_functional::all_reduce", []), ("symm_mem::one_shot_all_reduce", ["buffer-mismatch"])]
)
def test_where_peers_read_each_others_memory_all_operands_lie_in_it(op: str, found: list[str]) -> None:
    def build(b: Functional) -> Any:
        return b.relu(b.wait(b.call(op, b.relu(b.x), "sum", "dp")))

    original = program(build, build)
    ranks = iter((0, 1))

    def on_the_first(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        if next(ranks) == 0:
            nodes["relu"].meta["comm_buffer"] = place(0)

    assert kinds("memory", original, edited(original, on_the_first)) == found
