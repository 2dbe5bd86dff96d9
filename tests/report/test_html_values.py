"""What the page says of values: ranks that agree once, differences marked where they are, and never too much."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from tcverify.domains import Exact
from tcverify.execution import Lockstep, Run
from tcverify.explain.diagnosis import diagnose
from tcverify.program import GraphBuilder, InputSpec, Mesh, Placement, Program, Recipe, spmd_program
from tcverify.report.html import nodes as html_nodes
from tcverify.report.html.drawings import make_sheets
from tcverify.report.html.page import make_page
from tcverify.report.html.tensors import MAX_ELEMENTS
from tcverify.report.html.values import MAX_ENTRIES, Runs, rank_text, record
from tests.support.html_cases import case

SHARD = Placement("shard", 0)


def program(
    build: Callable[[GraphBuilder, fx.Node], object], shape: tuple[int, ...] = (4, 2), ranks: int = 2
) -> Program:
    """One input, split over all ranks along dim 0, and what is made of it."""
    inputs = [InputSpec("x", shape, placements=(("tp", SHARD),), recipe=Recipe("uniform"))]
    return spmd_program(Mesh.grid({"tp": ranks}), inputs, lambda b: build(b, b.input("x")), seed=5)


def run(of: Program) -> Run:
    return Lockstep().run(of, observe=True)


def scaled(factor: float) -> Callable[[GraphBuilder, fx.Node], object]:
    return lambda b, x: b.call("aten::mul.Tensor", x, factor)


def runs(factor: float, shape: tuple[int, ...] = (4, 2), ranks: int = 2) -> Runs:
    """Times 1 before, times `factor` after."""
    before, after = (run(program(scaled(f), shape, ranks)) for f in (1.0, factor))
    return Runs(before, after, range(ranks))


def test_ranks_whose_values_agree_are_told_once() -> None:
    gathered = program(lambda b, x: b.call("tensor_cast::all_gather", x, 0, b.rank, b.group("tp")), ranks=4)
    found = record(Runs(run(gathered), run(gathered), range(4)), "all_gather", "all_gather", True)
    assert found is not None
    (entry,) = found.entries
    assert (entry.ranks, entry.verdict, entry.wrong) == ("0–3", "equal", False)
    own = record(Runs(run(gathered), run(gathered), range(4)), "x", "x", True)
    assert own is not None
    assert [e.ranks for e in own.entries] == ["0", "1", "2", "3"]


def test_elements_that_differ_are_marked_and_the_worst_is_named() -> None:
    found = record(runs(1.5), "mul", "mul", True)
    assert found is not None
    for entry, result in zip(found.entries, run(program(scaled(1.0))).ranks, strict=True):
        assert result.values is not None
        expected = result.values["mul"].reshape(-1)
        assert entry.differing == (0, 1, 2, 3)
        assert entry.worst == int(expected.abs().argmax())
        assert entry.wrong
        assert entry.verdict.startswith("4 of 4 elements differ, most at [")
        assert f"difference {0.5 * float(expected.abs().max()):.3g}" in entry.verdict


def test_what_differs_looks_different() -> None:
    found = record(runs(1.0 + 1e-7), "mul", "mul", True)
    assert found is not None
    for entry in found.entries:
        assert entry.before is not None
        assert entry.after is not None
        assert all(a != b for a, b in zip(entry.before.elements, entry.after.elements, strict=True))


def test_rounding_is_no_difference() -> None:
    found = record(runs(1.0 + 1e-12), "mul", "mul", True)
    assert found is not None
    assert {(e.verdict, e.wrong, e.differing) for e in found.entries} == {("equal", False, ())}


def test_of_large_tensors_the_least_the_mean_and_the_greatest_are_told_and_what_is_around_the_worst() -> None:
    shape = (2, MAX_ELEMENTS, 9)
    found = record(runs(0.5, shape), "mul", "mul", True)
    assert found is not None
    values = run(program(scaled(1.0), shape)).ranks[0].values
    assert values is not None
    whole = values["mul"]
    entry = found.entries[0]
    assert entry.before is not None
    assert entry.before.elements == ()
    assert entry.before.summary == (
        f"least {float(whole.min()):.4g}, mean {float(whole.mean()):.4g}, greatest {float(whole.max()):.4g}"
    )
    assert entry.before.sample is not None
    index, elements, worst = entry.before.sample
    assert len(elements) == 8
    assert elements[worst] == f"{float(whole.reshape(-1)[whole.abs().argmax()]):.4g}"
    assert index.startswith("[0, ")


def test_residues_are_told_with_all_their_digits() -> None:
    exact = [Lockstep().run(program(scaled(f)), observe=True, domain=Exact(0)) for f in (1.0, 1.0 + 1e-12)]
    found = record(Runs(exact[0], exact[1], range(2)), "mul", "mul", True)
    assert found is not None
    for entry in found.entries:
        assert entry.wrong
        assert entry.after is not None
        assert all(re.fullmatch(r"-?\d+", text) for text in entry.after.elements)


def test_what_is_not_finite_is_told() -> None:
    def undefined(b: GraphBuilder, x: fx.Node) -> object:
        return b.call("aten::div.Tensor", x, b.call("aten::sub.Tensor", x, x))

    found = record(Runs(run(program(undefined, (2, 100))), None, range(2)), "div", "", False)
    assert found is not None
    assert [(e.ranks, e.before.summary) for e in found.entries if e.before is not None] == [("0, 1", "100 not finite")]
    both = run(program(undefined))
    same = record(Runs(both, both, range(2)), "div", "div", True)
    assert same is not None
    assert {e.verdict for e in same.entries} == {"equal"}


def test_shapes_that_differ_are_told() -> None:
    before = program(lambda b, x: b.call("aten::mul.Tensor", x, 2.0))
    after = program(lambda b, x: b.call("aten::unsqueeze", x, 0))
    found = record(Runs(run(before), run(after), range(2)), "mul", "unsqueeze", True)
    assert found is not None
    assert found.entries[0].verdict == "of shape [1, 2, 2], where the original has [2, 2]"


def test_parts_of_a_tuple_are_told_apart() -> None:
    def split(b: GraphBuilder, x: fx.Node) -> object:
        return b.call("aten::split.Tensor", x, 1, 1)

    both = run(program(split))
    found = record(Runs(both, both, (0,)), "split", "split", True)
    assert found is not None
    assert [e.part for e in found.entries] == ["[0]", "[1]"]


def test_values_that_are_not_to_be_equal_are_not_compared() -> None:
    found = record(runs(2.0), "mul", "mul", False)
    assert found is not None
    assert {(e.verdict, e.wrong, e.differing) for e in found.entries} == {("", False, ())}


def test_a_node_that_nobody_computed_has_no_values() -> None:
    assert record(runs(1.0), "nothing", "nothing", True) is None


def test_ranks_that_differ_are_bounded() -> None:
    found = record(runs(1.0, (MAX_ENTRIES + 3, 2), MAX_ENTRIES + 3), "mul", "mul", True)
    assert found is not None
    assert len(found.entries) == MAX_ENTRIES
    assert found.more == "3 further ranks"


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([0, 1], "0, 1"), ([5, 2, 1, 0], "0–2, 5"), ([3, 4, 5, 8, 9], "3–5, 8, 9")]
)
def test_neighbouring_ranks_are_joined(ranks: list[int], text: str) -> None:
    assert rank_text(ranks) == text


def test_an_operand_is_compared_with_what_the_original_reads_in_its_place() -> None:
    (_, bad, _), (_, silu, values), _ = make_page(case("wrong-value", 3), None).blamed
    assert bad.flag == "diverges"
    assert silu.relation.startswith("a partial sum of the original's 'all_reduce_1'")
    assert values is not None
    assert (values.before, values.after) == ("all_reduce_1", "silu")
    summed = [torch.tensor([float(t) for t in n.elements]) for e in values.entries for n in (e.before, e.after) if n]
    assert torch.allclose(summed[0], 2 * summed[1], rtol=1e-2)


def test_nodes_are_described_from_the_difference_on_until_the_page_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 12_000
    monkeypatch.setattr(html_nodes, "MAX_CHARACTERS", room)
    found = case("wrong-value", 9)
    (sheet,) = make_sheets(found, diagnose(found.program, found.rewritten, found.finding), range(2))
    data = json.loads(sheet.cards.data())
    assert 0.5 * room < len(json.dumps(data["values"])) < 1.5 * room
    flagged = next(i for i, box in enumerate(sheet.drawing.panels[1].boxes) if box.flag)
    kept = ["v" in data["nodes"][box.id] for box in sheet.drawing.panels[1].boxes]
    assert all(kept[flagged - 2 : flagged + 3])
    assert not kept[0]
    assert not kept[-2]


def test_data_cannot_end_the_element_that_holds_it() -> None:
    (sheet,) = make_sheets(
        found := case("wrong-value"), diagnose(found.program, found.rewritten, found.finding), range(2)
    )
    card = next(iter(sheet.cards.by_box.values()))
    cards = replace(sheet.cards, by_box={"pa0": replace(card, name="</script><!-- & -->", call="]]>")})
    text = cards.data()
    assert not set(text) & set("<>&")
    assert json.loads(text)["nodes"]["pa0"]["n"] == "</script><!-- & -->"
