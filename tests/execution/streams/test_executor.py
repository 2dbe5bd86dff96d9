"""The stream executor: each planted defect is seen in some order, its sound neighbour in none."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence
from tcverify.execution import Exploration, Lockstep, StreamOrder, explore
from tcverify.execution.streams.executor import MOST_OBSERVATIONS, SimulatedStreams
from tcverify.execution.streams.exploration import few_orders
from tcverify.execution.streams.issue import issue
from tcverify.ops import WAIT, qualified_name
from tcverify.program import Contract, Mesh, MeshDim, Program
from tcverify.program.finding import Doubt, Finding
from tcverify.verification.verifier import verify
from tests.passes.multistream.test_random import random_program
from tests.support.lowered import Build, Lowering, program
from tests.support.programs import TP2
from tests.support.random_lowered import draw
from tests.support.stream_programs import lowered

GRID = Mesh.grid({"dp": 2, "tp": 2})


def explored(*builds: Build, mesh: Mesh = TP2, **options: Any) -> Exploration:
    """All that matters of a program's orders."""
    found = explore(program(*builds, mesh=mesh), systematic=True, **options)
    assert found is not None
    assert found.complete
    return found


def seen(*builds: Build, **options: Any) -> set[tuple[str, str, str]]:
    """(kind, op that saw it, other op) of all that went wrong on rank 0 but wrong outputs, which follow from it."""
    found = explored(*builds, **options)
    return {(o.kind, o.node, o.other) for o in found.observations if o.rank == 0 and o.kind != "output"}


def sound(*builds: Build, **options: Any) -> None:
    found = explored(*builds, **options)
    assert found.observations == []
    assert found.failing == []


# ------------------------------------------------------------------------------------------------------------ accesses


def cross(b: Lowering, *, waits: bool = True, joins: bool = True) -> Any:
    """mm on stream 0, relu of it on stream 1, joined by the output."""
    product = b.mm(b.x)
    out = b.relu(b.wait(product, 1, *([b.record(product)] if waits else [])))
    done = b.record(out, 1)
    return b.wait(out, 0, *([done] if joins else []))


def test_a_read_before_its_write_reads_poison() -> None:
    sound(cross)
    found = explored(lambda b: cross(b, waits=False))
    first = found.observations[0]
    assert (first.kind, first.node, first.stream, first.other) == ("RAW", "relu", 1, "mm")
    assert [str(event) for event in first.events] == ["rank 0, stream 1: 'relu' runs"]
    assert {o.text for o in found.observations if o.kind == "output"} == {
        "output 0 differs from what it is in issue order"
    }


def test_outputs_are_read_on_the_main_stream() -> None:
    assert seen(lambda b: cross(b, joins=False)) == {("RAW", "output", "relu")}
    sound(lambda b: cross(b, joins=False), boundary="lenient")


def test_a_token_of_another_op_orders_nothing() -> None:
    def build(b: Lowering, *, right: bool) -> Any:
        early = b.relu(b.x)
        wrong = b.record(early)
        product = b.mm(early)
        token = b.record(product)
        out = b.relu(b.wait(product, 1, token if right else wrong))
        return b.wait(out, 0, b.record(out, 1))

    sound(lambda b: build(b, right=True))
    assert seen(lambda b: build(b, right=False)) == {("RAW", "relu_1", "mm")}


def test_a_wait_on_the_wrong_stream_moves_the_op() -> None:
    def build(b: Lowering, stream: int) -> Any:
        first = b.mm(b.wait(b.x, 1))
        second = b.relu(b.wait(first, stream))  # without a token: right on the stream of its operand alone
        return b.wait(second, 0, b.record(second, stream))

    sound(lambda b: build(b, 1))
    assert seen(lambda b: build(b, 2)) == {("RAW", "relu", "mm")}


def test_a_write_before_a_read() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        buffer = b.mm(b.x)
        token = b.record(buffer)
        read = b.relu(b.wait(buffer, 1, token))
        reader = b.record(read, 1)
        if waits:
            b.call("aten::add_.Tensor", buffer, b.wait(b.y, 0, reader))
        else:
            b.call("aten::add_.Tensor", buffer, b.y)
        return b.wait(read, 0, reader)

    sound(lambda b: build(b, waits=True))
    assert seen(lambda b: build(b, waits=False)) == {("WAR", "relu", "add_")}


def test_two_writes_in_the_wrong_order() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        buffer = b.mm(b.x)
        token = b.record(buffer)
        b.call("aten::fill_.Scalar", buffer, 1.0)
        filled = b.record(buffer)
        b.call("aten::copy_", buffer, b.wait(b.y, 1, filled if waits else token))
        return b.wait(buffer, 0, b.record(buffer, 1))

    sound(lambda b: build(b, waits=True))
    assert ("fill_", "copy_") in {(a, b) for _, a, b in seen(lambda b: build(b, waits=False))}


def test_a_mutated_input_is_read_by_the_caller() -> None:
    def build(b: Lowering, *, joins: bool) -> Any:
        b.call("aten::mul_.Tensor", b.x, b.wait(b.y, 1))
        token = b.record(b.x, 1)
        return b.relu(b.wait(b.y, 0, *([token] if joins else [])))

    sound(lambda b: build(b, joins=True))
    found = explored(lambda b: build(b, joins=False))
    assert {(o.kind, o.node, o.other) for o in found.observations if o.kind != "output"} == {("RAW", "output", "mul_")}
    assert {o.text for o in found.observations if o.kind == "output"} == {
        "input 'x' after the run differs from what it is in issue order"
    }


def test_inputs_may_be_written_on_the_main_stream() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        tokens = [b.record(b.relu(b.x))] if waits else []
        out = b.mm(b.wait(b.x, 1, *tokens))
        return b.wait(out, 0, b.record(out, 1))

    sound(lambda b: build(b, waits=False))
    sound(lambda b: build(b, waits=True), inputs="stream0")
    found = seen(lambda b: build(b, waits=False), inputs="stream0")
    assert found == {("RAW", "mm", "the inputs")}


def test_ungated_operands_need_an_order_from_elsewhere() -> None:
    def build(b: Lowering, *, ordered: bool) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        out = b.add(product, b.wait(b.y, 1, *([token] if ordered else [])))
        return b.wait(out, 0, b.record(out, 1))

    sound(lambda b: build(b, ordered=True))
    assert seen(lambda b: build(b, ordered=False)) == {("RAW", "add", "mm")}


def test_a_second_user_of_a_wait_comes_after_what_its_stream_has_waited_for() -> None:
    def build(b: Lowering, stream: int) -> Any:
        product = b.mm(b.x)
        gated = b.wait(product, 1, b.record(product))
        first = b.relu(gated)
        second = b.add(b.wait(gated, stream), b.y) if stream != 1 else b.add(gated, b.wait(b.y, 1))
        return b.wait(b.wait(first, 0), 0), b.wait(second, 0, b.record(second, stream))

    sound(lambda b: build(b, 1))
    assert ("RAW", "add", "mm") in seen(lambda b: build(b, 2))


def test_items_of_tuples_and_views_are_no_work() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        both = b.call("tensor_cast::add_rms_norm2", b.x, b.y, b.mm(b.x), 1e-6)
        item = b.getitem(both, 1)
        token = b.record(item)
        turned = b.call("aten::t", b.call("aten::view", item, [4, 4]))
        out = b.relu(b.wait(turned, 1, *([token] if waits else [])))
        return b.wait(out, 0, b.record(out, 1))

    sound(lambda b: build(b, waits=True))
    assert seen(lambda b: build(b, waits=False)) == {("RAW", "relu", "add_rms_norm2")}


def test_writes_through_a_view_reach_the_readers_of_its_base() -> None:
    def build(b: Lowering, *, waits: bool) -> Any:
        buffer = b.mm(b.x)
        token = b.record(buffer)
        row = b.call("aten::select.int", buffer, 0, 0)
        b.call("aten::mul_.Scalar", row, 2.0)
        written = b.record(row)
        out = b.relu(b.wait(buffer, 1, written if waits else token))
        return b.wait(out, 0, b.record(out, 1))

    sound(lambda b: build(b, waits=True))
    assert ("RAW", "relu", "mul_") in seen(lambda b: build(b, waits=False))


def test_a_cast_is_work_although_all_floats_are_carried_alike() -> None:
    def build(b: Lowering) -> Any:
        product = b.mm(b.x)
        token = b.record(product)
        cast = b.call("aten::to.dtype", b.wait(product, 1, token), torch.float64)
        return b.wait(cast, 0, b.record(cast, 1))

    sound(build)
    issued, _ = issue(program(build))
    assert [(op.node, op.stream) for op in issued[0].ops] == [("mm", 0), ("to", 1), ("output", 0)]


def test_a_wait_that_is_written_into_is_a_copy() -> None:
    def build(b: Lowering) -> Any:
        product = b.mm(b.x)
        copy = b.wait(product, 1, b.record(product))
        b.call("aten::add_.Tensor", copy, b.y)
        done = b.record(copy, 1)
        return product, b.wait(copy, 0, done)

    sound(build)  # nothing races: what the write has missed is for the comparison with the original to say


def test_a_wait_that_is_written_into_through_a_view_is_a_copy() -> None:
    def build(b: Lowering) -> Any:
        product = b.mm(b.x)
        copy = b.wait(product, 1, b.record(product))
        b.call("aten::mul_.Scalar", b.call("aten::select.int", copy, 0, 0), 2.0)
        done = b.record(copy, 1)
        return product, b.wait(copy, 0, done)

    sound(build)
    _, run = issue(program(build))
    product, copy = run.ranks[0].outputs
    assert torch.equal(copy[0], product[0] * 2)
    assert torch.equal(copy[1:], product[1:])


# -------------------------------------------------------------------------------------------------------- collectives


def two_reductions(b: Lowering, *, waits: bool, dims: tuple[str, str] = ("tp", "tp")) -> Any:
    first = b.reduce(b.wait(b.x, 1), dim=dims[0])
    token = b.record(first, 1)
    second = b.reduce(b.wait(b.y, 2, *([token] if waits else [])), dim=dims[1])
    return b.wait(first, 0, token), b.wait(second, 0, b.record(second, 2))


def test_collectives_of_one_communicator_are_ordered() -> None:
    sound(lambda b: two_reductions(b, waits=True))
    assert seen(lambda b: two_reductions(b, waits=False)) == {("collective-order", "all_reduce_1", "all_reduce")}
    sound(lambda b: two_reductions(b, waits=False, dims=("dp", "tp")), mesh=GRID)


def test_ranks_that_enter_collectives_in_different_orders_get_wrong_values_or_wait_for_ever() -> None:
    def other(b: Lowering) -> Any:
        return two_reductions(b, waits=True)

    found = explored(lambda b: two_reductions(b, waits=False), other)
    assert {o.kind for o in found.observations} == {"collective-order", "output"}

    def kinds(b: Lowering, *, ordered: bool) -> Any:
        first = b.reduce(b.wait(b.x, 1))
        token = b.record(first, 1)
        operand = b.wait(b.y, 2, *([token] if ordered else []))
        second = b.call("tensor_cast::all_gather", operand, 0, b.rank, b.group("tp"))
        return b.wait(first, 0, token), b.wait(second, 0, b.record(second, 2))

    found = explored(lambda b: kinds(b, ordered=False), lambda b: kinds(b, ordered=True))
    assert "mismatch" in {o.kind for o in found.observations}


def test_who_waits_for_whom_is_said_in_words() -> None:
    """What ends in issue order never waits forever; so a rank is made to wait for an op that it issues later."""
    mesh = Mesh(2, (MeshDim("tp", ((0, 1),)), MeshDim("pt", ((1, 0),))))
    issued, run = issue(program(lambda b: two_reductions(b, waits=True, dims=("tp", "pt")), mesh=mesh))
    first, second, output = issued[1].ops
    issued[1].ops[:] = replace(first, after=(1,)), replace(second, after=()), output
    (found,) = SimulatedStreams(issued, run.ranks).run("as issued", lambda place, ends: place[1])
    assert found.kind == "deadlock"
    assert found.text == (
        "rank 0's 'all_reduce' on stream 1 waits for rank 1 in group [0, 1]; "
        "rank 1's 'all_reduce' on stream 1 waits for 'all_reduce_1'; "
        "rank 1's 'all_reduce_1' on stream 2 waits for rank 0 in group [1, 0]; "
        "rank 0's 'all_reduce_1' on stream 2 waits for 'all_reduce'"
    )


def test_a_collective_may_read_until_it_ends() -> None:
    """Rank 1 leaves the second collective after the first: so rank 0 has begun the first one, but not ended it."""

    def rank0(b: Lowering) -> Any:
        first = b.reduce(b.wait(b.x, 1), dim="dp")
        token = b.record(first, 1)
        second = b.reduce(b.wait(b.y, 2), dim="tp")
        done = b.record(second, 2)
        late = b.add(b.wait(second, 0, done), first)  # nothing on this rank orders it behind the first
        b.record(late, 0)
        return b.wait(late, 0), b.wait(first, 0, token)

    assert ("RAW", "add", "all_reduce") in seen(rank0, mesh=GRID)


# -------------------------------------------------------------------------------------------------------------- orders


def test_orders_are_functions_of_their_data() -> None:
    def build(b: Lowering) -> Any:
        return two_reductions(b, waits=False)

    again = [explored(build, orders=[StreamOrder("random", seed=5), StreamOrder("rush", stream=2)]) for _ in range(2)]
    assert again[0].observations == again[1].observations
    assert again[0].failing == again[1].failing != []


def test_few_orders_starve_each_stream_and_draw_one() -> None:
    issued, run = issue(program(cross))
    assert run.finished
    assert [str(order) for order in few_orders(issued)] == ["starve stream 0", "starve stream 1", "random, seed 0"]


def test_rushing_and_starving_show_a_missing_wait_or_hide_it() -> None:
    racy = program(lambda b: cross(b, waits=False))
    for order, wrong in (
        (StreamOrder("rush", stream=1), True),
        (StreamOrder("starve", stream=1), False),
        (StreamOrder("issue"), False),
    ):
        found = explore(racy, orders=[order])
        assert found is not None
        assert not found.complete
        assert bool(found.observations) == wrong, order


def test_outputs_of_every_order_are_those_of_lockstep() -> None:
    plain: Program = program(cross)
    reference = Lockstep().run(plain)
    found = explore(plain, reference=reference, systematic=True)
    assert found is not None
    assert found.observations == []
    reference.ranks[1].outputs[0] = reference.ranks[1].outputs[0] + 1
    found = explore(plain, reference=reference, orders=[StreamOrder("issue")])
    assert found is not None
    assert [(o.kind, o.rank) for o in found.observations] == [("output", 1)]


def test_of_very_many_observations_some_are_kept() -> None:
    def build(b: Lowering) -> Any:
        product = b.mm(b.x)
        return [b.relu(b.wait(product, 1)) for _ in range(2 * MOST_OBSERVATIONS)]

    found = explore(program(build), orders=[StreamOrder("rush", stream=1)])
    assert found is not None
    assert sum(o.kind == "RAW" for o in found.observations) == MOST_OBSERVATIONS


def test_programs_without_anchors_are_not_explored() -> None:
    assert explore(program(lambda b: b.mm(b.x))) is None


def test_the_inputs_of_other_runs_stay_as_they_are() -> None:
    plain = program(cross)
    before = [value.clone() for value in Lockstep().run(plain).ranks[0].inputs]
    explored(lambda b: cross(b, waits=False), inputs="stream0")
    after = Lockstep().run(plain).ranks[0].inputs
    assert all(bool((a == b).all()) for a, b in zip(before, after, strict=True))


# -------------------------------------------------------------------------------------------- agreement with the checks


class Split:
    """A pass that runs relu on stream 1, with a token of what it reads or without."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        ops = torch.ops.tensor_cast
        graph, val = gm.graph, {n.name: n.meta["val"] for n in gm.graph.nodes if n.op != "output"}
        nodes = {n.name: n for n in graph.nodes}
        product, relu, output = nodes["mm"], nodes["relu"], nodes["output"]

        def insert(target: Any, like: str, *args: Any) -> fx.Node:
            node = graph.call_function(target.default, args)
            node.meta["val"] = target.default(val[like], *args[1:2], *([[]] if len(args) == 3 else []))
            return node

        with graph.inserting_before(relu):
            token = insert(ops._internal_record, "mm", product, 0)
            gated = insert(ops._internal_wait_and_bind, "mm", product, 1, [token] if self.waits else [])
        relu.replace_input_with(product, gated)
        with graph.inserting_before(output):
            done = insert(ops._internal_record, "relu", relu, 1)
            joined = insert(ops._internal_wait_and_bind, "relu", relu, 0, [done])
        output.replace_input_with(relu, joined)
        gm.recompile()
        return gm


@pytest.mark.parametrize("deep", [False, True])
def test_a_race_comes_with_an_order_that_shows_it(deep: bool) -> None:
    plain = program(lambda b: b.relu(b.mm(b.x)))
    assert verify(Split(waits=True), plain, deep=False).status == "passed"
    verdict = verify(Split(waits=False), plain, deep=deep)
    race = next(f for f in verdict.findings if f.kind == "race")
    assert "executor-divergence" not in {f.kind for f in verdict.findings}
    assert race.data["order"] == "starve stream 0"
    assert race.data["events"] == ["rank 0, stream 1: 'relu' runs"]
    assert "an order that shows it (starve stream 0): 'relu' on stream 1 reads the storage of 'mm'" in race.detail


def test_orders_and_happens_before_must_agree() -> None:
    good, bad = program(cross), program(lambda b: cross(b, waits=False))
    wrong = explored(lambda b: cross(b, waits=False))

    def judged(rewritten: Program, found: Exploration) -> list[Finding | Doubt]:
        return CHECKS["interleavings"](
            Evidence(Pair(rewritten, rewritten, changed=True), Contract(), taken={"stream-orders": found})
        )

    assert judged(bad, wrong) == []
    assert judged(good, explored(cross)) == []
    (unfounded,) = judged(good, wrong)
    assert isinstance(unfounded, Finding)
    assert (unfounded.kind, unfounded.node, unfounded.rank) == ("executor-divergence", "relu", 0)
    (unseen,) = judged(bad, explored(cross))
    assert isinstance(unseen, Finding)
    assert unseen.title.startswith(
        "none of 6 orders of the streams shows what happens-before finds: 'relu' on stream 1"
    )
    few = explored(cross)
    few.complete = False
    assert judged(bad, few) == []
    settled = explored(cross)
    settled.settled = 1  # its peers order what its own queues leave open: no order can show that
    assert judged(bad, settled) == []


def test_pairs_that_only_peers_order_are_counted() -> None:
    """Rank 1 enters the second reduction after the first has ended: so rank 0 cannot end it before it has run 'mm'."""

    def leaves_open(b: Lowering) -> Any:
        product = b.mm(b.x)
        first = b.reduce(b.wait(product, 1, b.record(product)), dim="tp")
        token = b.record(first, 1)
        second = b.reduce(b.wait(b.y, 2), dim="pt")
        late = b.add(b.wait(second, 3, b.record(second, 2)), product)
        return b.wait(late, 0, b.record(late, 3)), b.wait(first, 0, token)

    def orders(b: Lowering) -> Any:
        product = b.mm(b.x)
        first = b.reduce(b.wait(product, 1, b.record(product)), dim="tp")
        token = b.record(first, 1)
        second = b.reduce(b.wait(b.y, 2, token), dim="pt")
        done = b.record(second, 2)
        return b.wait(second, 0, done), b.wait(first, 0, token)

    mesh = Mesh(2, (MeshDim("tp", ((0, 1),)), MeshDim("pt", ((1, 0),))))
    rewritten = program(leaves_open, orders, mesh=mesh)
    found = explore(rewritten, systematic=True)
    assert found is not None
    assert (found.complete, found.settled, found.observations) == (True, 1, [])
    evidence = Evidence(Pair(rewritten, rewritten, changed=True), Contract(), taken={"stream-orders": found})
    assert [f.kind for f in CHECKS["happens-before"](evidence) if isinstance(f, Finding)] == ["race"]
    assert CHECKS["interleavings"](evidence) == []


# ------------------------------------------------------------------------------------------------------ random programs


@pytest.mark.parametrize("seed", range(32))
def test_systematic_orders_show_all_that_is_not_ordered(seed: int) -> None:
    """Ten random programs a seed, against the transitive closure of queues and tokens: every pair that is seen is unordered,
    and where any conflicting pair is unordered, something is seen."""
    for number in range(10):
        drawn = draw(seed * 10 + number)
        found = explore(drawn.program, systematic=True)
        assert found is not None
        assert found.complete
        assert found.settled == 0  # all ranks run the same
        races = {(o.other, o.node) for o in found.observations if o.kind in ("RAW", "WAW") and o.rank == 0}
        races |= {(o.node, o.other) for o in found.observations if o.kind == "WAR" and o.rank == 0}
        orders = {(o.other, o.node) for o in found.observations if o.kind == "collective-order" and o.rank == 0}
        races = {pair if drawn.issued(*pair) else pair[::-1] for pair in races}
        assert races <= drawn.races
        assert bool(races) == bool(drawn.races), drawn.races
        assert orders <= drawn.unordered
        assert bool(orders) == bool(drawn.unordered), drawn.unordered
        assert not found.observations or drawn.races or drawn.unordered
        evidence = Evidence(
            Pair(drawn.program, drawn.program, changed=True), Contract(), taken={"stream-orders": found}
        )
        assert CHECKS["interleavings"](evidence) == []  # nor does happens-before say anything else


def lowered_at_random(seed: int) -> Program | None:
    """A random program as the scheduling pass lowers it; every second one with a token lost or a wait on another stream."""
    original = random_program(seed)
    rewritten = original.with_graphs([lowered(original, rank=rank) for rank in range(original.world_size)])
    waits = [n for graph in rewritten.graphs for n in graph.nodes if qualified_name(n.target) == WAIT]
    if not waits:
        return None
    choose = random.Random(seed)
    if choose.random() < 0.5:
        wait = choose.choice([w for w in waits if w.args[2]] or waits)
        value, stream, tokens = wait.args
        if choose.random() < 0.7:
            wait.args = value, stream, list(tokens)[1:]
        else:
            wait.args = value, choose.randrange(4), tokens
    return rewritten


@pytest.mark.parametrize("seed", range(0, 120, 8))
def test_orders_of_lowered_programs_agree_with_happens_before(seed: int) -> None:
    """Views, tuples, writes, fused ops, two groups: on sound programs and on broken ones, both find something or neither."""
    for rewritten in filter(None, map(lowered_at_random, range(seed, seed + 8))):
        found = explore(rewritten, systematic=True)
        assert found is not None
        evidence = Evidence(Pair(rewritten, rewritten, changed=True), Contract(), taken={"stream-orders": found})
        assert CHECKS["interleavings"](evidence) == []
        static = CHECKS["happens-before"](evidence)
        assert all(isinstance(finding, Finding) for finding in static)
        if not static:
            assert found.observations == []
