"""Deallocation: what is freed, behind which node, on which stream; what never is; and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tcverify import Contract, verify
from tcverify.errors import Unsupported
from tcverify.execution import explore
from tcverify.passes.editing import op_name
from tcverify.passes.resharding.deallocation import InsertDeallocations
from tcverify.passes.resharding.writing import HostWriter
from tcverify.program import Placed, PlacedBuilder, Program

MESH = "[1, 0]"
PROMISES = Contract(deallocation=True, streams=3, inputs="stream0")

Body = Callable[[PlacedBuilder, Placed, Placed], Placed | tuple[Placed, ...]]
Write = Callable[[HostWriter, fx.Node, fx.Node], fx.Node]


def build(body: Body) -> Program:
    """x and y [4, 6] on two ranks."""
    b = PlacedBuilder(2)
    x, y = (b.input(name, (4, 6), f"{MESH} replicated") for name in ("x", "y"))
    made = body(b, x, y)
    return b.build(*(made if isinstance(made, tuple) else (made,)))


def written(write: Write) -> Callable[[fx.GraphModule], None]:
    """A pass that puts what `write` writes, of x and y, in place of all ops."""

    def lower(gm: fx.GraphModule) -> None:
        x, y, *ops, output = gm.graph.nodes
        writer = HostWriter(gm.graph)
        with writer.before(output):
            result = write(writer, x, y)
        output.args = ((result,),)
        for node in reversed(ops):
            if not node.users:
                gm.graph.erase_node(node)
        gm.recompile()

    return lower


def freed(gm: fx.GraphModule) -> list[tuple[str, str]]:
    """Frees in order: the op that made what is freed, and the op behind which it is."""
    InsertDeallocations()(gm)
    found = []
    for node in gm.graph.nodes:
        if op_name(node) == "host_ir::deallocate":
            last = node.prev
            while op_name(last) == "host_ir::deallocate":
                last = last.prev
            found.append((short(node.args[0]), short(last)))
    return found


def short(node: object) -> str:
    return op_name(node).split("::")[-1].split(".")[0] if isinstance(node, fx.Node) else str(node)


def relu_of_sum(b: PlacedBuilder, x: Placed, y: Placed) -> Placed:
    return b.call("aten::relu", b.call("aten::add.Tensor", x, y))


LOCAL: dict[str, tuple[Body, list[tuple[str, str]]]] = {
    "a chain": (relu_of_sum, [("add", "relu")]),
    "views keep what they show alive": (
        lambda b, x, y: b.call(
            "aten::sum.dim_IntList", b.call("aten::t", b.call("aten::view", b.call("aten::neg", x), [6, 4])), [0]
        ),
        [("neg", "sum")],
    ),
    "an output that is a view": (lambda b, x, y: b.call("aten::t", b.call("aten::neg", x)), []),
    "an output and what it is made of": (
        lambda b, x, y: (lambda total: (total, b.call("aten::relu", total)))(b.call("aten::add.Tensor", x, y)), [],
    ),
    "an input that is returned": (lambda b, x, y: (x, b.call("aten::t", y)), []),
    "views of inputs": (
        lambda b, x, y: b.call("aten::exp", b.call("aten::neg", b.call("aten::t", x))), [("neg", "exp")],
    ),
    "what is written in place": (
        lambda b, x, y: b.call("aten::add.Tensor", b.call("aten::relu_", b.call("aten::neg", x)), y), [("neg", "add")],
    ),
    "two at once": (
        lambda b, x, y: b.call("aten::add.Tensor", b.call("aten::neg", x), b.call("aten::exp", y)),
        [("neg", "add"), ("exp", "add")],
    ),
    "results of a set": (lambda b, x, y: b.call("aten::relu", b.set(x, f"{MESH} shard(0)")), [("set", "relu")]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOCAL)
def test_everything_is_freed_behind_its_last_use(name: str) -> None:
    body, expected = LOCAL[name]
    assert freed(build(body).graph_module(0)) == expected
    verdict = verify(InsertDeallocations(), build(body))
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]
    assert verdict.changed == bool(expected)


# ----------------------------------------------------------------------------------------- communications and streams


def gathered(w: HostWriter, x: fx.Node, y: fx.Node) -> fx.Node:
    """The operand and the output of a communication are named for the last time while it is under way."""
    double = w.call("aten::add.Tensor", x, x)
    out, unread = w.allocate([8, 6], torch.float32), w.allocate([8, 6], torch.float32)
    first = w.call("host_ir::all_gather", double, 0, [1, 0], out=out)
    second = w.call("host_ir::all_gather", y, 0, [1, 0], out=unread)
    mean = w.call("aten::neg", y)
    w.wait(first)
    total = w.call("aten::sum.dim_IntList", out, [0])
    w.wait(second)
    return w.call("aten::add.Tensor", mean, total)


def sent(w: HostWriter, x: fx.Node, y: fx.Node) -> fx.Node:
    """Tokens are left; what is sent is freed behind the wait."""
    double = w.call("aten::add.Tensor", x, x)
    out = w.allocate([4, 6], torch.float32)
    posted = w.call("host_ir::permute", double, [1, 0], [0, 1], out=w.call("aten::view", out, [4, 6]))
    w.wait(posted)
    return w.call("aten::relu", out)


def on_workers(w: HostWriter, x: fx.Node, y: fx.Node, *, join: bool = True, back: bool = True) -> fx.Node:
    """`whole` is read on two workers, `double` is made and used on one."""
    whole = w.call("aten::neg", x)
    out = w.allocate([2, 4, 6], torch.float32)
    caller = w.current_stream()
    workers = [w.stream(0), w.stream(2)]
    for worker in workers:
        w.set_stream(worker)
        w.synchronize(caller)
    for index, worker in enumerate(workers):
        w.set_stream(worker)
        double = w.call("aten::add.Tensor", whole, y)
        w.call("aten::copy_", w.call("aten::select.int", out, 0, index), double)
        w.set_stream(caller)
        if join:
            w.synchronize(worker)
    return w.call("aten::sum.dim_IntList", out, [0]) if back else w.call("aten::neg", x)


def through_another(w: HostWriter, x: fx.Node, y: fx.Node) -> fx.Node:
    """The caller waits for worker 1, which has waited for worker 0."""
    caller, first, second = w.current_stream(), w.stream(0), w.stream(1)
    whole = w.call("aten::neg", x)
    w.set_stream(first)
    w.synchronize(caller)
    part = w.call("aten::exp", whole)
    w.set_stream(second)
    w.synchronize(first)
    result = w.call("aten::relu", part)
    w.set_stream(caller)
    w.synchronize(second)
    return result


WRITTEN: dict[str, tuple[Write, list[tuple[str, str]]]] = {
    "under way": (gathered, [("add", "wait"), ("empty", "sum"), ("empty", "wait"), ("neg", "add"), ("sum", "add")]),
    "permuted": (sent, [("add", "wait"), ("empty", "relu")]),
    "on workers": (
        on_workers, [("add", "copy_"), ("add", "copy_"), ("neg", "synchronize"), ("empty", "sum")],
    ),
    "through another worker": (through_another, [("neg", "synchronize"), ("exp", "synchronize")]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_communications_and_streams_are_waited_for(name: str) -> None:
    write, expected = WRITTEN[name]
    program = build(relu_of_sum)
    modules = program.graph_modules()
    for gm in modules:
        written(write)(gm)
        assert freed(gm) == expected
    lowered = program.with_graphs([gm.graph for gm in modules])
    found = explore(lowered, inputs="stream0", systematic=True)
    assert found is not None
    assert not found.observations
    plain = program.with_graphs([graph_without_frees(gm).graph for gm in modules])
    verdict = verify(InsertDeallocations(), plain, contract=PROMISES)
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]


def graph_without_frees(gm: fx.GraphModule) -> fx.GraphModule:
    for node in reversed(list(gm.graph.nodes)):
        if op_name(node) == "host_ir::deallocate":
            gm.graph.erase_node(node)
    return gm


def test_what_nobody_reads_is_freed() -> None:
    gm = build(relu_of_sum).graph_module(0)

    def write(w: HostWriter, x: fx.Node, y: fx.Node) -> fx.Node:
        w.call("aten::neg", x)
        w.allocate([2], torch.float32)
        w.call("aten::t", w.call("aten::exp", x))
        return w.call("aten::relu", y)

    written(write)(gm)
    assert freed(gm) == [("neg", "neg"), ("empty", "empty"), ("exp", "t")]


def test_each_of_several_results_is_freed_also_those_that_nobody_takes() -> None:
    gm = build(relu_of_sum).graph_module(0)

    def write(w: HostWriter, x: fx.Node, y: fx.Node) -> fx.Node:
        most = w.call("aten::max.dim", x, 0)
        return w.call("aten::relu", w.call("python::getitem", most, 0))

    written(write)(gm)
    assert freed(gm) == [("getitem", "getitem"), ("getitem", "relu")]
    gm.graph.lint()
    frees = [node.args[0] for node in gm.graph.nodes if op_name(node) == "host_ir::deallocate"]
    assert [node.args[1] for node in frees] == [1, 0]


def test_of_several_results_one_is_returned_and_the_other_freed() -> None:
    def most(gm: fx.GraphModule) -> None:
        (add,) = (node for node in gm.graph.nodes if op_name(node) == "aten::argmax")
        writer = HostWriter(gm.graph)
        with writer.before(add):
            x = add.args[0]
            place = writer.call("python::getitem", writer.call("aten::max.dim", x, 0), 1)
        add.replace_all_uses_with(place)
        gm.graph.erase_node(add)
        InsertDeallocations()(gm)

    verdict = verify(most, build(lambda b, x, y: b.call("aten::argmax", x, 0)), contract=Contract(deallocation=True))
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]


@pytest.mark.parametrize("said", [{}, {"val": None}])
def test_values_without_metadata_are_freed_too(said: dict[str, None]) -> None:
    gm = build(relu_of_sum).graph_module(0)
    node = next(node for node in gm.graph.nodes if op_name(node) == "aten::add.Tensor")
    del node.meta["val"]
    node.meta.update(said)
    assert freed(gm) == [("add", "relu")]


def test_a_graph_that_makes_nothing_else_is_not_touched() -> None:
    gm = build(lambda b, x, y: b.call("aten::neg", x)).graph_module(0)
    before = gm.code
    assert InsertDeallocations()(gm).code == before


def test_a_long_chain_takes_linear_time() -> None:
    gm = build(relu_of_sum).graph_module(0)

    def write(w: HostWriter, x: fx.Node, y: fx.Node) -> fx.Node:
        for _ in range(2000):
            x = w.call("aten::neg", x)
        return x

    written(write)(gm)
    assert freed(gm) == [("neg", "neg")] * 1999


# ----------------------------------------------------------------------------------------------------------- refusals


def refused(write: Write, words: str) -> None:
    gm = build(relu_of_sum).graph_module(0)
    written(write)(gm)
    before = str(gm.graph)
    with pytest.raises(Unsupported, match=words) as error:
        InsertDeallocations()(gm)
    assert error.value.hint
    assert str(gm.graph) == before


def test_a_graph_that_frees_already_is_refused() -> None:
    def write(w: HostWriter, x: fx.Node, y: fx.Node) -> fx.Node:
        total = w.call("aten::add.Tensor", x, y)
        result = w.call("aten::relu", total)
        w.deallocate(total)
        return result

    refused(write, "'deallocate' frees memory already")


def test_a_communication_that_nobody_waits_for_is_refused() -> None:
    def write(w: HostWriter, x: fx.Node, y: fx.Node) -> fx.Node:
        w.call("host_ir::all_reduce", x, "sum", [0, 1], out=w.allocate([4, 6], torch.float32))
        return w.call("aten::relu", y)

    refused(write, "no node waits for 'all_reduce'")


def test_a_worker_that_the_caller_does_not_wait_for_is_refused() -> None:
    refused(
        lambda w, x, y: on_workers(w, x, y, join=False, back=False),
        "does not wait for the worker stream that uses 'neg'",
    )


def test_an_op_that_is_not_known_is_refused() -> None:
    def write(w: HostWriter, x: fx.Node, y: fx.Node) -> fx.Node:
        made = w.graph.call_method("relu", (x,))
        made.meta["val"] = x.meta["val"]
        return w.call("aten::neg", made)

    refused(write, "it is not known what 'relu.*' does with memory")


def test_a_storage_of_changing_size_is_refused() -> None:
    def write(w: HostWriter, x: fx.Node, y: fx.Node) -> fx.Node:
        return w.call("aten::relu", w.call("aten::t_", w.call("aten::neg", x)))

    refused(write, "touches memory in a way that cannot be followed")


def test_a_stream_that_is_no_token_is_refused() -> None:
    def write(w: HostWriter, x: fx.Node, y: fx.Node) -> fx.Node:
        w.set_stream(y)
        return w.call("aten::relu", w.call("aten::neg", x))

    refused(write, "names a stream by 'y'")
