"""Reports of lowered resharding: listing, drawing of streams as columns, collectives with roots, and the missing order."""

from __future__ import annotations

import json
from functools import cache

from torch import fx

from tcverify.application import PassFacts
from tcverify.cases.counterexample import Counterexample, make_counterexample
from tcverify.execution import Lockstep
from tcverify.ops import lookup
from tcverify.program import Contract, Program
from tcverify.report.block import make_block
from tcverify.report.html import to_html
from tcverify.report.html.collectives import timelines
from tcverify.report.html.order import stream_predecessors
from tcverify.report.html.page import make_page
from tcverify.report.html.streams import draw_schedule
from tcverify.report.trace import to_trace
from tcverify.verification.verifier import verify
from tests.execution.streams.test_host_executor import gathered_matmul, pipelined
from tests.explain.test_diagnosis_resharding import one
from tests.support import resharding_defects as defects
from tests.support.pipelined_programs import gathered
from tests.support.pipelined_programs import pipelined as rewritten

FACTS = PassFacts("mine", "mine.py:Pass", {}, "abc", {})


class Unjoined:
    """Pipelines soundly, but for the caller's stream, which does not wait for the workers."""

    contract = Contract(inputs="stream0")

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        pipelined(gm, left_out="join")
        gm.recompile()
        return gm


def case_of(lower: object, program: Program, kind: str) -> Counterexample:
    return make_counterexample(verify(lower, program), kind, FACTS, Contract(inputs="stream0"))  # type: ignore[arg-type]


@cache
def unjoined() -> Counterexample:
    return case_of(Unjoined(), gathered_matmul(), "race")


def test_a_listing_says_layouts_and_no_shapes_of_streams() -> None:
    lines = [line.text for line in make_block(unjoined(), None).graph]
    assert "set_1: [4, 3, 2, 5] = set(a, [2, 0, 1] shard(1) → [2, 0, 1] replicated)" in lines
    assert "current_stream = current_stream()" in lines
    reduction = case_of(
        defects.planted(defects.zero_for_max), one("[0, 1] shard(0)", "[2] replicated", op="min", shape=(2, 3)), "wrong-value"
    )  # fmt: skip
    lines = [line.text for line in make_block(reduction, None).graph]
    assert "reduce: [3] = reduce(None, min over dim 0, [0, 1] shard(0) → [2] replicated)" in lines


def test_the_order_that_the_output_lacks_is_drawn() -> None:
    drawn = draw_schedule(unjoined(), 0)
    assert drawn is not None
    assert drawn.missing
    before, after = drawn.charts
    assert [bar.node for bar in before.bars] == ["set_1", "matmul"]
    (missing,) = (link.title for link in after.links if link.kind == "missing")
    assert missing == "missing order: the output does not wait for 'copy_'"
    assert after.join is not None


def test_each_stream_is_a_column() -> None:
    graph = rewritten(gathered(2, (0, 1), 3), number_of_streams=2).graphs[0]
    before = stream_predecessors(graph)
    nodes = {node.name: node for node in graph.nodes}
    assert before[nodes["matmul_1"]] == (nodes["wait"],)
    chain, node = [], nodes["copy__2"]  # the third step, on the stream of the first
    while before.get(node):
        node = before[node][0]
        chain.append(node.name)
    assert {"copy_", "all_gather", "matmul_1"} <= set(chain)
    assert not {"copy__1", "all_gather_1"} & set(chain)
    synchronised = [
        n for n in graph.nodes if n.op == "call_function" and lookup(n.target).name == "host_ir::synchronize"
    ]
    assert nodes["copy__2"] in before[synchronised[-1]]
    assert stream_predecessors(gathered(2, (0, 1), 3).graphs[0]) == {}


def test_roots_that_get_and_roots_that_give() -> None:
    for source, target, said in (
        ("[0, 1] shard(0)", "[2] replicated", "[6, 3], dim 0, to rank 2"),
        ("[0] replicated", "[1, 2] replicated", "[12, 3], from rank 0"),
    ):
        program = one(source, target)
        after = verify(defects.planted(lambda graph, rank: None), program).pair.rewritten
        assert after is not None
        before, lowered = timelines(Lockstep().run(program), Lockstep().run(after))
        assert {cell.detail for cell in lowered.rows[0][1] if cell is not None} == {said}
        assert any(f"{source} → {target}" in cell.detail for cell in before.rows[0][1] if cell is not None)


def test_pages_and_traces_are_made() -> None:
    case = unjoined()
    assert "worker 0" in to_html(case, None)
    names = {e["args"]["name"] for e in json.loads(to_trace(case))["traceEvents"] if e["name"] == "thread_name"}
    assert {"caller", "worker 0", "team [2, 0, 1]"} <= names


def test_the_output_of_a_communication_is_not_said_to_be_read() -> None:
    program = one("[1, 0] shard(0)", "[1, 0] replicated")
    page = make_page(case_of(defects.planted(defects.rank_order), program, "wrong-value"), None)
    assert [card.name for _, card, _ in page.blamed] == ["all_gather", "x"]
