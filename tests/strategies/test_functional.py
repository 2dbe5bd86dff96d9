"""Asynchronous programs: every piece is reached, nothing that is under way is touched, large ones are made in seconds."""

from __future__ import annotations

import time

import pytest
import torch

from tcverify.execution import Lockstep
from tcverify.ops import lookup, qualified_name
from tcverify.program import Mesh, MeshDim, Program, dumps, shard
from tcverify.strategies.draft import DraftValue, NoSite, PerRank, attempt
from tcverify.strategies.functional.bucketing import BucketingWriter
from tcverify.strategies.functional.choices import HEADER, KINDS, RECORD
from tcverify.strategies.functional.draft import AsyncDraft
from tcverify.strategies.functional.programs import MOTIFS, WIDTH, decode_functional
from tcverify.strategies.timing import WIDTH as TIMING_WIDTH
from tcverify.strategies.transformer.roles import roles_of
from tests.sizes import by_night
from tests.support.large_functional import large_functional_program

TP2 = Mesh.grid({"tp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})
UNEVEN = Mesh(3, (MeshDim("tp", ((0,), (2, 1))),))
AR = "_c10d_functional::all_reduce"
WAIT = "_c10d_functional::wait_tensor"
RESHARDED = "_dtensor::shard_dim_alltoall"


def drawn(*records: dict[str, object], mesh: Mesh = TP2, **header: object) -> Program:
    """The program of a header and records, by fields of their tables."""
    first = bytes(HEADER[name].index(header.get(name, table[0])) for name, table in HEADER.items())
    kinds = KINDS[str(header.get("theme", "any"))]
    rows = []
    for record in records:
        tables = {**RECORD, "kind": kinds}
        rows.append(bytes(table.index(record.get(name, table[0])) for name, table in tables.items()))
    return decode_functional(mesh, first + bytes(TIMING_WIDTH) + b"".join(rows))


def calls(program: Program, graph: int = 0) -> list[str]:
    nodes = program.graphs[graph].nodes
    return [qualified_name(n.target).split("::")[1] for n in nodes if n.op == "call_function"]


# ------------------------------------------------------------------------------------------------------------ decoding


#: Motifs that only the strategy `effects` draws; tests/pytorch/test_effects.py runs its programs.
DRAWN_BY_EFFECTS = set(KINDS["joint"]) - {kind for theme in HEADER["theme"] for kind in KINDS[theme]}


def test_every_kind_has_a_motif_and_every_theme_begins_with_none() -> None:
    assert {kind for table in KINDS.values() for kind in table} == {"none", *MOTIFS}
    assert all(table[0] == "none" for table in KINDS.values())
    assert all(theme in KINDS for theme in HEADER["theme"])


def test_no_choices_return_an_input() -> None:
    program = decode_functional(TP2, b"")
    assert (program.size, len(program.inputs)) == (0, 1)


@pytest.mark.parametrize("kind", sorted(MOTIFS.keys() - DRAWN_BY_EFFECTS))
@pytest.mark.parametrize("mesh", [GRID, UNEVEN], ids=["grid", "uneven"])
def test_every_way_of_a_kind_runs(kind: str, mesh: Mesh) -> None:
    reached = 0
    theme = next(theme for theme, table in KINDS.items() if kind in table)
    before = [{"kind": "compute"}] * 4
    without = dumps(drawn(*before, mesh=mesh, theme=theme))
    uses, forms = sorted(set(RECORD["use"])), sorted(set(RECORD["form"]))
    for how in range(0, 64, 3):
        record = {
            "kind": kind, "how": how, "a": how * 5 % 256, "b": how * 7 % 256, "group": how, "use": uses[how % len(uses)],
            "form": forms[how % len(forms)], "delay": (0, 1, -1)[how % 3],
        }  # fmt: skip
        program = drawn(*before, record, record, mesh=mesh, theme=theme)
        reached += dumps(program) != without
        run = Lockstep().run(program)
        assert run.finished, run.why
    assert reached >= (0 if kind == "swapped" and mesh is UNEVEN else 5)


def test_a_collective_is_waited_for_directly_later_or_at_the_end() -> None:
    def places(delay: int) -> tuple[int, int]:
        found = calls(drawn({"kind": "collective", "delay": delay}, *[{"kind": "compute"}] * 4))
        return found.index("all_reduce"), found.index("wait_tensor")

    start, wait = places(0)
    assert wait == start + 1
    start, wait = places(2)
    assert wait == start + 3
    start, wait = places(-1)
    assert wait > start + 4


def test_gradients_of_layers_are_reduced_and_parameters_stepped() -> None:
    layers = [{"use": "update", "delay": 1}] * 4
    found = calls(drawn(*layers, theme="data-parallel", depth=2))
    assert found.count("all_reduce") == found.count("wait_tensor") == found.count("add_.Tensor") == 2


def test_ranks_send_and_receive_in_different_orders() -> None:
    program = drawn({"kind": "exchange"})
    orders = [[c for c in calls(program, binding.graph) if c in ("send", "recv")] for binding in program.ranks]
    assert sorted(orders) == [["recv", "send"], ["send", "recv"]]


def test_large_programs_take_seconds() -> None:
    size = by_night(5000, 1250)
    before = time.perf_counter()
    program = large_functional_program(GRID, size, 3)
    assert time.perf_counter() - before < size * 6e-3
    found = calls(program)
    assert 0.9 * size <= len(found) <= 1.3 * size
    assert found.count("wait_tensor") > 0.08 * size
    assert dumps(large_functional_program(GRID, 300, 3)) == dumps(large_functional_program(GRID, 300, 3))
    assert Lockstep().run(large_functional_program(GRID, 300, 3)).finished


# -------------------------------------------------------------------------------------------------------------- drafts


def begun() -> tuple[AsyncDraft, DraftValue]:
    draft = AsyncDraft(TP2)
    return draft, draft.input("x", (4, 2))


def test_what_is_under_way_is_neither_read_nor_written_into() -> None:
    draft, x = begun()
    under_way = draft.call("_c10d_functional::all_to_all_single", x, [2, 2], [2, 2], "tp")
    for op, *args in (("aten::relu", under_way), ("aten::add_.Tensor", under_way, x), ("aten::add_.Tensor", x, x)):
        with pytest.raises(NoSite):
            draft.call(str(op), *args)
    assert draft.spec(draft.call("aten::view", under_way, [-1])).shape == (8,)  # a view touches nothing
    draft.call("aten::relu", x)  # a collective and others may read side by side
    arrived = draft.call(WAIT, under_way)
    draft.call("aten::add_.Tensor", x, arrived)
    assert draft.flying == {}


def test_what_a_start_has_copied_may_be_written_at_once() -> None:
    draft, x = begun()
    under_way = draft.call(AR, x, "sum", "tp")
    draft.call("aten::add_.Tensor", x, x)
    with pytest.raises(NoSite):
        draft.call("aten::relu", under_way)


def test_a_view_of_what_is_under_way_is_under_way_too_and_waiting_for_it_is_enough() -> None:
    draft, x = begun()
    view = draft.call("aten::view", draft.call(AR, x, "sum", "tp"), [-1])
    with pytest.raises(NoSite):
        draft.call("aten::relu", view)
    draft.call("aten::relu", draft.call(WAIT, view))


def test_a_coalesced_call_reads_until_all_of_it_has_arrived() -> None:
    draft, x = begun()
    y = draft.input("x", (4, 2))
    both = draft.call("_c10d_functional::all_gather_into_tensor_coalesced", [x, y], 2, "tp")
    draft.call(WAIT, draft.item(both, 0))
    assert not draft.writable(x)
    draft.call(WAIT, draft.item(both, 1))
    assert draft.writable(x)


def test_members_of_a_group_must_contribute_equal_shapes() -> None:
    draft = AsyncDraft(TP2)
    uneven = draft.input("x", (3, 2), placements=(("tp", shard(0)),))
    with pytest.raises(NoSite):
        draft.call(AR, uneven, "sum", "tp")


def test_what_did_not_fit_leaves_nothing_behind() -> None:
    draft, x = begun()
    w = BucketingWriter(draft, roles_of(TP2), None)

    def write(w: BucketingWriter) -> None:
        w.pool.append(draft.input("x", (4, 2)))
        draft.call("_c10d_functional::all_to_all_single", x, [2, 2], [2, 2], "tp")
        draft.call("aten::add_.Tensor", x, x)

    assert not attempt(w, write)
    assert (len(draft), draft.flying, w.pool) == (1, {}, [])
    assert draft.writable(x)
    program = draft.program((x, draft.input("x", (4, 2))), 0, [])
    assert [spec.name for spec in program.inputs] == ["x", "x2"]


@pytest.mark.parametrize(("how", "arrives"), [(24, WAIT), (8, RESHARDED)])
def test_some_ranks_do_not_read_a_result_that_they_wait_for(how: int, arrives: str) -> None:
    program = drawn({"kind": "partly-read", "how": how})
    assert {"partly-read", "rank-dependent"} <= set(program.labels)
    read = []
    for binding in program.ranks:
        nodes = program.graphs[binding.graph].nodes
        (arrived,) = (node for node in nodes if node.op == "call_function" and qualified_name(node.target) == arrives)
        read.append(bool(arrived.users))
    assert read == [True, False]
    assert calls(program, 0) == calls(program, 1)
    run = Lockstep().run(program)
    assert run.finished
    assert not torch.equal(run.ranks[0].outputs[0], run.ranks[1].outputs[0])


@pytest.mark.parametrize("mesh", [TP2, GRID, UNEVEN])
def test_results_of_two_blocking_collectives_are_read_in_other_orders(mesh: Mesh) -> None:
    program = drawn({"kind": "blocking", "how": 8 + 12 + 1}, mesh=mesh, hidden=8)
    assert {"blocking", "rank-dependent"} <= set(program.labels)
    read = []
    for binding in program.ranks:
        nodes = list(program.graphs[binding.graph].nodes)
        blocking = [node for node in nodes if node.op == "call_function" and lookup(node.target).collective]
        assert {qualified_name(node.target) for node in blocking} == {RESHARDED}
        readers = [min(nodes.index(user) for user in node.users if user.op != "output") for node in blocking]
        assert len(readers) == 2
        read.append(readers[0] < readers[1])
    assert len(set(read)) == 2
    assert Lockstep().run(program).finished


def test_like_ops_differ_in_one_thing_at_most() -> None:
    how = {op: number for number, op in enumerate(("add", "unary", "sub", "mul", "linear", "div"))}
    alike = drawn({"kind": "like-ops", "how": how["sub"] + 8 * 2, "b": 4})
    subtractions = [
        n for n in alike.graphs[0].nodes if n.op == "call_function" and qualified_name(n.target) == "aten::sub.Tensor"
    ]
    assert [n.kwargs for n in subtractions] == [{"alpha": 2}] * 3
    retyped = drawn({"kind": "like-ops", "how": how["unary"] + 8 * 3, "group": 2})
    tanh = [n for n in retyped.graphs[0].nodes if n.op == "call_function" and qualified_name(n.target) == "aten::tanh"]
    assert [n.meta["val"].dtype for n in tanh] == [torch.float32, torch.bfloat16]
    chained = drawn({"kind": "like-ops", "how": how["mul"] + 8 * 4})
    first, last = (
        n for n in chained.graphs[0].nodes if n.op == "call_function" and qualified_name(n.target) == "aten::mul.Tensor"
    )
    assert first in last.all_input_nodes


@pytest.mark.parametrize("order", range(8))
@pytest.mark.parametrize("cut", range(4))
def test_pieces_are_joined_in_some_order(order: int, cut: int) -> None:
    """The value of the join is made of rows of the two values that are cut, and nothing else."""
    program = drawn({"kind": "pieces", "how": 4 * order, "b": cut, "group": 3}, tokens=2)
    assert {"pieces"} <= set(program.labels)
    (join,) = (
        n for n in program.graphs[0].nodes if n.op == "call_function" and qualified_name(n.target) == "aten::cat"
    )
    parts = join.args[0]
    assert isinstance(parts, list)
    assert len(parts) >= (1 if order == 6 else 2)
    sources = {n.all_input_nodes[0].all_input_nodes[0] if cut in (0, 2) else n.all_input_nodes[0] for n in parts}
    assert len(sources) == (2 if order == 1 else 1)
    assert Lockstep().run(program).finished


def test_calls_of_some_ranks_and_swapped_ones_make_graphs_of_their_own() -> None:
    draft, x = begun()
    target = PerRank("peer", lambda rank: 1 - rank)
    draft.call("p2p::send", x, target, only=frozenset({0}))
    y = draft.call("aten::clone", x)
    draft.call("p2p::recv_", y, target, only=frozenset({1}))
    a, b = draft.call("aten::relu", y), draft.call("aten::tanh", y)
    draft.swaps.append((a.number, b.number, frozenset({1})))
    draft.after.append((b.number, a.number))
    program = draft.program((a, b), 0, [])
    assert calls(program, 0) == ["send", "clone", "relu", "tanh"]
    assert calls(program, 1) == ["clone", "recv_", "tanh", "relu"]
    assert [n.meta["after"] for n in program.graphs[0].nodes if n.name == "tanh"] == [["relu"]]
    first, second = (result.outputs for result in Lockstep().run(program).ranks)
    assert second[0].equal(program.values(0)[0].relu())
    assert first[0].equal(second[0])


def test_bytes_of_any_value_decode() -> None:
    assert Lockstep().run(decode_functional(GRID, b"\xff" * WIDTH)).finished
