"""Options that come with a program: kept in files, seen by passes, drawn, and dropped when they do not matter."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import fx

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.cases.counterexample import make_counterexample
from tcverify.errors import ProgramError
from tcverify.program import Contract, Mesh, Program, dumps, loads, program_id
from tcverify.report.html.document import to_html
from tcverify.report.text import to_text
from tcverify.shrink import reduce
from tcverify.strategies import DECODERS, functional_programs
from tcverify.strategies.options import with_options
from tcverify.verification.verifier import verify
from tests.sizes import by_night

TOLD = {"mode": "fast", "cap": 0.5, "deep": True, "sizes": (1, 2), "nothing": None}


def program(**options: object) -> Program:
    decoder = DECODERS["functional"]
    drawn = decoder.decode(Mesh.grid({"tp": 2}), bytes(i * 37 % 256 for i in range(decoder.width)))
    return replace(drawn, options=options)  # type: ignore[arg-type]


def double_when_told(gm: fx.GraphModule) -> None:
    """Wrong when the options say so, and only then."""
    if gm.meta.get("options", {}).get("mode") != "fast":
        return
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    operand = next(node for node in output.all_input_nodes)
    with gm.graph.inserting_before(output):
        doubled = gm.graph.call_function(torch.ops.aten.add.Tensor, (operand, operand))
    output.replace_input_with(operand, doubled)


def test_files_hold_them() -> None:
    told = program(**TOLD)
    again = loads(dumps(told))
    assert again.options == TOLD
    assert dumps(again) == dumps(told)
    assert program_id(told) != program_id(program())
    assert "options" not in json.loads(dumps(program()))


def test_every_rank_is_told() -> None:
    told = program(**TOLD)
    assert [module.meta["options"] for module in told.graph_modules()] == [TOLD, TOLD]
    assert "options" not in program().graph_module(0).meta
    assert told.with_graphs([told.graph(0), told.graph(1)]).options == TOLD


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"no name": 1}, "cannot name an option"),
        ({"f": object()}, "option 'f' is"),
        ({"f": float("nan")}, "option 'f' is nan"),
        ({"f": [1]}, "option 'f' is"),
        ({"f": (((1,),),)}, "option 'f' is"),
        ({f"o{i}": i for i in range(65)}, "65 options"),
    ],
)
def test_what_files_cannot_hold_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        program(**options)


@pytest.mark.parametrize("options", [[], 3, {"f": {"g": 1}}])
def test_malformed_options_in_files_are_refused(options: object) -> None:
    record = json.loads(dumps(program(a=1)))
    record["options"] = options
    with pytest.raises(ProgramError, match="option"):
        loads(json.dumps(record))


def test_the_one_that_matters_is_kept_and_the_others_are_dropped() -> None:
    told = program(**TOLD)
    subject = InProcess(prepare_pass(double_when_told, "", {}))
    assert verify(subject, told).status == "refuted"
    assert verify(subject, replace(told, options={"cap": 0.5})).status != "refuted"
    reduced = reduce(told, lambda one: verify(subject, one).status == "refuted").program
    assert reduced.options == {"mode": "fast"}


def test_all_values_are_drawn_and_defaults_stay_unsaid() -> None:
    seen: Counter[object] = Counter()

    @settings(max_examples=by_night(60, 30), database=None, derandomize=True)
    @given(with_options(functional_programs(world_size=2), {"mode": ("plain", "fast", "slow"), "cap": (1.0, 2.0)}))
    def draw(drawn: Program) -> None:
        seen.update([drawn.options.get("mode", "plain"), drawn.options.get("cap", 1.0)])
        assert "plain" not in drawn.options.values()

    draw()
    assert set(seen) == {"plain", "fast", "slow", 1.0, 2.0}


def test_reports_say_what_the_pass_was_told() -> None:
    told = program(mode="fast", text="<b>&")
    verdict = verify(double_when_told, told)
    facts = prepare_pass(double_when_told, "", {}).facts
    case = make_counterexample(verdict, verdict.findings[0].kind, facts, Contract())
    assert "; options mode=fast, text=<b>&" in to_text(case, None, 200)
    page = to_html(case, None)
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&" not in page
