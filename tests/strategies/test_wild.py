"""Wild programs: every op is reached, and what does not fit is left out."""

from __future__ import annotations

import pytest

from tcverify.execution import Lockstep
from tcverify.program import Mesh, Program
from tcverify.strategies.choices import HEADER_WIDTH
from tcverify.strategies.wild.growths import GROWTHS
from tcverify.strategies.wild.programs import INPUT_WIDTH, INPUTS, OPS, WIDTH, decode_wild

TP2 = Mesh.grid({"tp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})


def wild(*records: tuple[str, int, int, int], mesh: Mesh = TP2, outputs: int = 0, inputs: bytes = b"") -> Program:
    rows = b"".join(bytes([OPS.index(op), a, b, how]) for op, a, b, how in records)
    header = bytes(HEADER_WIDTH) + bytes([outputs]) + inputs.ljust(INPUTS * INPUT_WIDTH, b"\0")
    return decode_wild(mesh, header + rows)


def calls(program: Program) -> list[str]:
    return [str(n.target).split(".")[1] for n in program.graphs[0].nodes if n.op == "call_function"]


def test_the_table_of_ops_names_every_growth_and_no_other() -> None:
    assert set(OPS) == {"none", *GROWTHS}
    assert OPS[0] == "none"


def test_no_choices_return_an_input() -> None:
    program = wild()
    assert (program.size, len(program.inputs)) == (0, 1)


@pytest.mark.parametrize("op", sorted(GROWTHS))
def test_every_way_of_an_op_runs(op: str) -> None:
    reached = 0
    for how in range(16):
        program = wild(
            (op, 0, how, how), ("norm", 0, 0, 0), (op, how * 9, how // 2, 3 * how), mesh=GRID, inputs=bytes([how] * 6)
        )
        reached += op in program.labels
        run = Lockstep().run(program)
        assert run.finished, run.hang or run.mismatch or run.error
    assert reached >= 6


def test_a_record_reads_the_newest_value_first() -> None:
    assert calls(wild(("all-reduce", 0, 0, 0), ("norm", 0, 0, 0))) == ["all_reduce", "rms_norm"]


def test_what_leads_nowhere_is_left_out() -> None:
    assert calls(wild(("norm", 0, 0, 0), ("all-reduce", 255, 0, 0))) == ["all_reduce"]


def test_several_ends_are_returned() -> None:
    program = wild(("norm", 0, 0, 0), ("all-reduce", 255, 0, 0), outputs=1)
    assert sorted(calls(program)) == ["all_reduce", "rms_norm"]


def test_an_op_that_does_not_fit_is_left_out() -> None:
    # Two tokens of four features flattened to eight elements: nothing is left that three dims could be made of.
    assert "attention" not in wild(("view", 0, 0, 1), ("attention", 0, 0, 0)).labels


def test_values_stay_small() -> None:
    grown = wild(*[("binary", 0, 0, 0)] * 20)
    assert max(float(v.abs().max()) for v in Lockstep().run(grown).ranks[0].outputs) < 100


def test_bytes_of_any_value_decode() -> None:
    assert Lockstep().run(decode_wild(GRID, b"\xff" * WIDTH)).finished
