"""Near misses: every mutation finds its place, does what it says, and leaves a program that every rank can run."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from tcverify.execution import Lockstep
from tcverify.ops import qualified_name
from tcverify.program import Mesh, Program, dumps
from tcverify.strategies import DECODERS
from tcverify.strategies.choices import decode_choices, encode_choices
from tcverify.strategies.transformer.mutations import MUTATIONS
from tcverify.strategies.transformer.near_miss import KINDS, RECORDS, SIZES, WIDTH, decode_records, write_mutated
from tcverify.strategies.transformer.programs import finish_program, write_program

TP2 = Mesh.grid({"tp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})

#: Something of everything: a view, markers, an add_rms_norm2, a sum, norms.
FIRST = {"mixer": "direct", "reduce": "all_reduce", "view": "between", "region": "begin", "norm": "fused2"}
SECOND = {"mixer": "gelu", "reduce": "all_reduce", "region": "end-copy", "norm": "unfused"}
THIRD = {"reduce": "all_reduce", "norm": "rms"}


def near_miss(
    *records: tuple[str, int, int], mesh: Mesh = TP2, blocks: Any = (FIRST, SECOND, THIRD), **setting: Any
) -> Program:
    setting = {"sequence": (2, 0), "layout": "bsh", "batch": 2, "entry": "norm"} | setting
    return write_mutated(mesh, *decode_choices(encode_choices(setting, list(blocks))), list(records))


def calls(program: Program, op: str) -> list[fx.Node]:
    nodes = program.graphs[0].nodes
    return [n for n in nodes if n.op == "call_function" and qualified_name(n.target) == op]


def returned(program: Program) -> list[fx.Node]:
    return list(next(n for n in program.graphs[0].nodes if n.op == "output").all_input_nodes)


def test_the_table_of_kinds_names_every_mutation_and_no_other() -> None:
    assert set(KINDS) == {"none", *MUTATIONS, *SIZES}
    assert KINDS[0] == "none"


def test_no_choices_mutate_nothing() -> None:
    assert decode_records(b"") == [("none", 0, 0)] * RECORDS
    plain = finish_program(write_program(TP2, *decode_choices(b"")))
    program = DECODERS["near-miss"].decode(TP2, b"")
    assert (program.size, len(program.inputs)) == (plain.size, len(plain.inputs))


def test_a_record_is_three_bytes() -> None:
    kind = KINDS.index("swapped")
    assert decode_records(bytes([kind, 7, 9])) == [("swapped", 7, 9), ("none", 0, 0), ("none", 0, 0)]


@pytest.mark.parametrize("kind", sorted({*MUTATIONS, *SIZES}))
def test_every_mutation_is_reached_by_bytes(kind: str) -> None:
    setting = {"sequence": (2, 0), "layout": "bsh", "batch": 2, "entry": "norm"}
    rest = encode_choices(setting, [FIRST, SECOND, THIRD])
    found = [
        DECODERS["near-miss"].decode(TP2, bytes([KINDS.index(kind), where, 0]).ljust(WIDTH - len(rest), b"\0") + rest)
        for where in range(2)
    ]
    assert any(kind in program.labels for program in found)


@pytest.mark.parametrize("kind", sorted(MUTATIONS))
def test_every_way_of_a_mutation_runs(kind: str) -> None:
    """Two of them, so that the second meets what the first has left."""
    reached = 0
    for how in range(16):
        program = near_miss((kind, how, how), (kind, how // 2, how // 3 * 8 + how), mesh=GRID)
        reached += kind in program.labels
        run = Lockstep().run(program)
        assert run.finished, run.hang or run.mismatch or run.error
    assert reached >= 4


def test_a_mutation_without_a_place_changes_nothing() -> None:
    before = near_miss(blocks=())
    after = near_miss(("negative-getitem", 0, 0), blocks=())
    assert dumps(before) == dumps(after)


@pytest.mark.parametrize(
    ("kind", "tokens", "sequence"),
    [("tokens-as-ranks", 2, (2, 0)), ("indivisible", 3, (2, 0)), ("few-tokens", 1, (2, 0)), ("square", 4, (2, 0))],
)
def test_sizes(kind: str, tokens: int, sequence: tuple[int, int]) -> None:
    program = near_miss((kind, 0, 0), sequence=sequence)
    assert program.inputs[0].shape == (2, tokens, 4)


def test_swapped_puts_the_residual_first() -> None:
    before, after = near_miss(), near_miss(("swapped", 0, 0))
    (first,), (second,) = (calls(p, "tensor_cast::add_rms_norm2") for p in (before, after))
    assert [str(a) for a in first.args[:2]] == [str(a) for a in second.args[1::-1]]


def test_a_tuple_is_returned_whole() -> None:
    program = near_miss(("tuple-whole", 0, 0))
    assert calls(program, "tensor_cast::add_rms_norm2")[0] in returned(program)


@pytest.mark.parametrize("how", [0, 1])
def test_one_result_of_a_tuple_is_read(how: int) -> None:
    program = near_miss(("one-result", 0, how))
    assert [n.args[1] for n in calls(program, "python::getitem")] == [1 - how]


def test_getitem_from_behind() -> None:
    found = calls(near_miss(("negative-getitem", 1, 0)), "python::getitem")
    assert sorted(n.args[1] for n in found) == [-2, 1]  # type: ignore[type-var]


def test_alpha() -> None:
    assert [n.kwargs for n in calls(near_miss(("alpha", 0, 0)), "aten::add.Tensor")] == [{"alpha": 2}]


def test_another_group_is_that_of_the_other_dim_first() -> None:
    program = near_miss(("other-group", 0, 0), mesh=GRID)
    groups = [n.args[2].name for n in calls(program, "tensor_cast::all_reduce")]  # type: ignore[union-attr]
    assert sorted(groups) == ["dp", "tp", "tp"]


def test_groups_of_the_same_ranks_in_another_order() -> None:
    program = near_miss(("other-group", 0, 0), mesh=TP2)
    groups = {program.ranks[1].constants[n.args[2].name][0] for n in calls(program, "tensor_cast::all_reduce")}  # type: ignore[union-attr]
    assert groups == {0, 1}


def test_what_is_rewritten_already_has_no_all_reduce_before_its_norm() -> None:
    before, after = near_miss(), near_miss(("rewritten", 1, 0))
    counts = [
        len(calls(p, f"tensor_cast::{op}"))
        for p in (before, after)
        for op in ("all_reduce", "reduce_scatter", "all_gather")
    ]
    assert counts == [3, 0, 0, 2, 1, 1]


@pytest.mark.parametrize("how", range(8))
def test_a_write_stays_whether_or_not_its_result_is_read(how: int) -> None:
    assert len(calls(near_miss(("in-place", 0, how)), "aten::add_.Tensor")) == 1


def test_a_write_that_nobody_reads_changes_what_others_read() -> None:
    block = {"mixer": "direct", "reduce": "all_reduce", "norm": "rms"}
    before, after = (near_miss(*r, blocks=[block]) for r in ((), [("in-place", 0, 0)]))
    (write_,) = calls(after, "aten::add_.Tensor")
    assert not write_.users
    first, second = (Lockstep().run(p).ranks[0].outputs[0] for p in (before, after))
    assert not first.equal(second)


def test_uneven_rows_give_ranks_graphs_of_their_own() -> None:
    program = near_miss(("uneven-rows", 0, 0))
    assert len(program.graphs) == 2


@pytest.mark.parametrize(("how", "shape"), [(0, (8, 4)), (1, (1,)), (3, (8, 1))])
def test_odd_weights(how: int, shape: tuple[int, ...]) -> None:
    program = near_miss(("odd-weight", 0, how))
    assert shape in {spec.shape for spec in program.inputs if spec.name.startswith("gain")}


@pytest.mark.parametrize("how", range(5))
def test_norm_weights_are_equal_on_all_members(how: int) -> None:
    """A pass may rely on it: what breaks its precondition is no counterexample."""
    program = near_miss(("odd-weight", 0, how))
    assert not any(spec.placements for spec in program.inputs if spec.name.startswith("gain"))


@pytest.mark.parametrize(("how", "placement"), [(0, "varying"), (1, "partial(sum)"), (2, "shard(0)"), (3, "shard(1)")])
def test_residuals_of_another_placement(how: int, placement: str) -> None:
    program = near_miss(("foreign-residual", 0, how))
    assert placement in {
        str(p) for spec in program.inputs if spec.name.startswith("residual") for _, p in spec.placements
    }
