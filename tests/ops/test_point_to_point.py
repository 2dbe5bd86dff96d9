"""Functional sends and receives: whom they meet, what arrives, who waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import verify
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.ops import ShapeError
from tcverify.program import VARYING, InputSpec, Mesh, MeshDim, dumps, loads
from tcverify.shrink.graph.named_groups import follow_smaller_mesh
from tcverify.shrink.graph.sketch import sketch_of
from tests.support.async_programs import Functional, program

#: Position 0 of "pp" is rank 2.
PP = Mesh(3, (MeshDim("pp", ((2, 0, 1),)),))
RELU = torch.ops.aten.relu.default
X = InputSpec("x", (4, 3), placements=(("pp", VARYING),))


def op(b: Functional, name: str, *args: Any) -> fx.Node:
    return b.call(f"_c10d_functional::{name}", *args)


def wait(b: Functional, value: fx.Node) -> fx.Node:
    return op(b, "wait_tensor", value)


def send(to: int, tag: int = 0) -> Callable[[Functional], Any]:
    def build(b: Functional) -> Any:
        sent = wait(b, op(b, "isend", b.x, to, tag, "pp"))
        return b.call("aten::relu", b.x), sent

    return build


def receive(source: int, tag: int = 0) -> Callable[[Functional], Any]:
    def build(b: Functional) -> Any:
        came = wait(b, op(b, "irecv", b.call("aten::zeros_like", b.x), source, tag, "pp"))
        return b.call("aten::relu", came), b.call("aten::new_empty", b.x, [0])

    return build


def idle(b: Functional) -> Any:
    return b.call("aten::relu", b.x), b.call("aten::new_empty", b.x, [0])


def values(made: Any) -> list[torch.Tensor]:
    run = Lockstep().run(made)
    assert run.finished, run.why
    return [result.outputs[0] for result in run.ranks]


def test_a_peer_is_a_position_in_the_group() -> None:
    made = program(send(1), idle, receive(0), mesh=PP, inputs=[X])  # rank 0, at position 1, sends to itself
    assert "rank 0 sends to itself" in str(Lockstep().run(made).error)
    made = program(send(2), receive(1), idle, mesh=PP, inputs=[X])  # to position 2, which is rank 1
    found = values(made)
    assert torch.equal(found[1], made.values(0)[0].double().relu())
    assert torch.equal(found[2], made.values(2)[0].double().relu())


def test_peers_outside_of_the_group_are_refused() -> None:
    made = program(send(3), idle, idle, mesh=PP, inputs=[X])
    assert "isend to position 3 of a group of 3 ranks" in str(Lockstep().run(made).error)


def test_a_batch_shifts_around_a_ring() -> None:
    def build(b: Functional) -> Any:
        place = PP.dim("pp").position(b.representative)
        there, back = (place + 1) % 3, (place - 1) % 3
        buffer = b.call("aten::zeros_like", b.x)
        batch = op(b, "batch_p2p_ops", ["isend", "irecv"], [there, back], [0, 0], [b.x, buffer], "pp")
        sent, came = wait(b, b.getitem(batch, 0)), wait(b, b.getitem(batch, 1))
        return b.call("aten::relu", came), sent

    made = program(build, build, build, mesh=PP, inputs=[X])
    found = values(made)
    order = [2, 0, 1]
    for position, rank in enumerate(order):
        assert torch.equal(found[rank], made.values(order[position - 1])[0].double().relu())
    assert dumps(loads(dumps(made))) == dumps(made)
    with ProcessGroupPool(3, timeout=60) as pool:
        verdict = verify(lambda module: module, made, confirm=pool)
    assert (verdict.status, verdict.executors) == ("passed", ["lockstep", "gloo"])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((["isend"], [1, 0], [0], "x"), "give as many of each"),
        ((["send"], [1], [0], "x"), "knows isend and irecv, and is given send"),
    ],
)
def test_batches_that_do_not_fit_together_are_refused(given: Any, sentence: str) -> None:
    with pytest.raises(ShapeError, match=sentence):
        program(lambda b: op(b, "batch_p2p_ops", *given[:3], [b.x], "pp"), mesh=PP, inputs=[X])


def test_tags_keep_transfers_apart() -> None:
    def two(b: Functional) -> Any:
        first = op(b, "isend", b.x, 2, 7, "pp")
        second = op(b, "isend", b.call("aten::neg", b.x), 2, 8, "pp")
        return wait(b, first), wait(b, second)

    def swapped(b: Functional, one: int, other: int) -> Any:
        zeros = [b.call("aten::zeros_like", b.x) for _ in range(2)]
        first, second = op(b, "irecv", zeros[0], 1, one, "pp"), op(b, "irecv", zeros[1], 1, other, "pp")
        return wait(b, first), wait(b, second)

    made = program(two, lambda b: swapped(b, 8, 7), idle, mesh=PP, inputs=[X])
    run = Lockstep().run(made)
    assert run.finished, run.why
    x = made.values(0)[0].double()
    assert torch.equal(run.ranks[1].outputs[0], -x)
    assert torch.equal(run.ranks[1].outputs[1], x)


def test_two_ranks_that_both_receive_first_wait_for_each_other() -> None:
    def build(b: Functional, peer: int) -> Any:
        came = wait(b, op(b, "irecv", b.call("aten::zeros_like", b.x), peer, 0, "pp"))
        return came, wait(b, op(b, "isend", b.x, peer, 0, "pp"))

    made = program(lambda b: build(b, 2), lambda b: build(b, 1), idle, mesh=PP, inputs=[X])
    hang = Lockstep().run(made).hang
    assert hang is not None
    assert hang.cycle


def test_shapes_that_differ_do_not_meet() -> None:
    def short(b: Functional) -> Any:
        return wait(b, op(b, "irecv", b.call("aten::new_zeros", b.x, [2, 3]), 1, 0, "pp")), b.x

    made = program(send(2), short, idle, mesh=PP, inputs=[X])
    assert not Lockstep().run(made).finished


def test_a_buffer_that_is_read_before_the_wait_is_a_race() -> None:
    made = program(send(2), receive(1), idle, mesh=PP, inputs=[X])

    def rewrite(module: fx.GraphModule, *, early: bool) -> fx.GraphModule:
        came = next((n for n in module.graph.nodes if n.name == "irecv"), None)
        if came is not None:
            wait_node, relu = next(iter(came.users)), module.graph.find_nodes(op="call_function", target=RELU)[0]
            if early:
                relu.replace_input_with(wait_node, came)
                relu.append(wait_node)
            else:
                relu.prepend(wait_node)
        module.recompile()
        return module

    assert verify(lambda module: rewrite(module, early=False), made).status == "passed"
    verdict = verify(lambda module: rewrite(module, early=True), made)
    assert verdict.status == "refuted"
    assert "async-race" in {finding.kind for finding in verdict.findings}, verdict.findings


def test_peers_follow_their_ranks_when_the_mesh_loses_one() -> None:
    """Of the reducer: rank 2, at position 0, goes; positions of the others move up."""
    made = program(send(2), receive(1), idle, mesh=PP, inputs=[X])  # rank 0, at position 1, to rank 1, at position 2
    smaller = Mesh(2, (MeshDim("pp", ((0, 1),)),))
    before = sketch_of(made)
    kept = replace(before, mesh=smaller, graphs=before.graphs[:2], ranks=before.ranks[:2])
    after = follow_smaller_mesh(kept, PP, [0, 1])
    assert after is not None
    found = [step for graph in after.graphs for step in graph if step.name in ("isend", "irecv")]
    assert [step.args[1] for step in found] == [1, 0]
    gone = replace(before, mesh=smaller, graphs=before.graphs[:1] + before.graphs[2:], ranks=before.ranks[:2])
    assert follow_smaller_mesh(gone, PP, [0, 2]) is None  # the rank that it sends to is no more
