"""Submodules: parts that share memory alone are reordered, regions form cycles; where the order is kept, nothing is found."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch import SUBJECTS
from tcverify.pytorch.splitting import RegionalInductor, SplitModule, _parts, inline_submodules
from tcverify.pytorch.subjects import release
from tcverify.strategies import DECODERS
from tcverify.verification.verifier import verify
from tests.sizes import by_night

TP2 = Mesh.grid({"tp": 2})
INPUTS = [InputSpec(name, (2, 2), placements=(("tp", VARYING),)) for name in ("x", "w")]
Build = Callable[..., Any]

needs_regions = pytest.mark.skipif(not SUBJECTS["regional_inductor"].here, reason="this torch has no regional_inductor")


def program(build: Build, **options: Any) -> Program:
    made = spmd_program(TP2, INPUTS, lambda b: build(b, *(b.input(one.name) for one in INPUTS)))
    return replace(made, options=options)


def drawn(strategy: str, seed: int) -> Program:
    decoder = DECODERS[strategy]
    return decoder.decode(TP2, bytes((seed * 37 + k * 101) % 251 for k in range(decoder.width)))


def updated_between_readers(b: GraphBuilder, x: fx.Node, w: fx.Node) -> Any:
    before = b.call("aten::exp", b.call("aten::mul.Tensor", x, w))
    b.call("aten::mul_.Tensor", w, 2)
    return [before, b.call("aten::mul.Tensor", w, 3)]


def names(gm: fx.GraphModule) -> list[str]:
    return [str(node.target).split(".")[1] for node in gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(("keep", "kinds", "order"), [
    (False, {"wrong-value"}, ["mul_", "mul", "mul", "exp"]),
    (True, set(), ["mul", "exp", "mul_", "mul"]),
])  # fmt: skip
def test_parts_that_share_memory_alone_are_reordered(keep: bool, kinds: set[str], order: list[str]) -> None:
    made = program(updated_between_readers, run=2, keep_original_order=keep)
    gm = SplitModule()(made.graph_module(0))
    assert gm is not None
    assert names(gm) == order
    assert {finding.kind for finding in verify(SplitModule(), made).findings} == kinds


@pytest.mark.parametrize("run", [1, 2, 3, "collectives"])
def test_in_their_original_order_nothing_is_found(run: int | str) -> None:
    ran = 0
    for seed in range(by_night(40, 14)):
        made = drawn("wild" if seed % 2 else "functional", seed)
        verdict = verify(SplitModule(run=run, keep_original_order=True), made)
        assert not verdict.findings, verdict.findings
        ran += verdict.status == "passed"
    assert ran > by_night(25, 8)


@pytest.mark.parametrize("run", [1, 2, 3])
def test_parts_that_write_nothing_may_be_reordered(run: int) -> None:
    fired = 0
    for seed in range(by_night(30, 12)):
        made = drawn("traced", seed)
        if any(_writes(node) for graph in made.graphs for node in graph.nodes):
            continue
        verdict = verify(SplitModule(run=run), made)
        assert not verdict.findings, verdict.findings
        fired += verdict.status == "passed" and verdict.changed
    assert fired > by_night(2, 0)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and "wait_tensor" not in schema.name


def test_an_item_stays_with_what_makes_it() -> None:
    def build(b: GraphBuilder, x: fx.Node, w: fx.Node) -> Any:
        halves = b.call("aten::split.Tensor", x, 1)
        return [b.call("aten::neg", b.call("python::getitem", halves, k)) for k in range(2)]

    made = program(build).graphs[0]
    parts = {node.name: part for node, part in _parts(made, 1).items()}
    assert parts == {"split": 0, "getitem": 0, "neg": 1, "getitem_1": 1, "neg_1": 2}


def test_a_collective_is_a_part_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from tcverify.pytorch import splitting

    seen: list[fx.GraphModule] = []
    monkeypatch.setattr(splitting, "inline_submodules", seen.append)

    def build(b: GraphBuilder, x: fx.Node, w: fx.Node) -> Any:
        made = b.call("aten::exp", b.call("aten::neg", x))
        made = b.call("_c10d_functional::wait_tensor", b.call("_c10d_functional::all_reduce", made, "sum", "tp"))
        return b.call("aten::exp", b.call("aten::neg", made))

    SplitModule(run="collectives", keep_original_order=True)(program(build).graph_module(0))
    (split,) = seen
    parts = [names(getattr(split, node.target)) for node in split.graph.find_nodes(op="call_module")]
    assert parts == [["neg", "exp"], ["all_reduce"], ["wait_tensor"], ["neg", "exp"]]


def by_turns(b: GraphBuilder, x: fx.Node, w: fx.Node) -> Any:
    left = b.call("aten::sin", x)
    unmarked = b.call("aten::neg", w)
    right = b.call("aten::sin", w)
    other = b.call("aten::neg", unmarked)
    left_next = b.call("aten::cos", right)
    last = b.call("aten::neg", other)
    return [left_next, b.call("aten::cos", left), last]


@pytest.mark.skipif(release(torch.__version__) < (2, 12), reason="this torch knows one region alone")
def test_regions_that_read_each_other_cannot_both_be_fused() -> None:
    made = program(by_turns, run=1, regions=2)
    (finding,) = verify(RegionalInductor(), made).findings
    assert finding.kind == "pass-raised"
    assert "dependency cycles" in finding.title + finding.detail
    assert verify(RegionalInductor(), replace(made, options={"run": 1})).status == "passed"


@needs_regions
@pytest.mark.parametrize("run", [1, 2, 3])
def test_one_region_is_sound(run: int) -> None:
    fired = 0
    for seed in range(by_night(30, 12)):
        verdict = verify(RegionalInductor(run=run, regions=1), drawn("traced", seed))
        assert not verdict.findings, verdict.findings
        fired += verdict.status == "passed" and verdict.changed
    assert fired > by_night(2, 0)


@needs_regions
def test_copies_into_inputs_are_not_marked_and_items_are_as_what_they_come_from() -> None:
    from tcverify.pytorch import splitting

    def build(b: GraphBuilder, x: fx.Node, w: fx.Node) -> Any:
        halves = b.call("aten::split.Tensor", x, 1)
        first = b.call("python::getitem", halves, 0)
        made = b.call("aten::neg", w)
        b.call("aten::copy_", w, made)
        return [first, made]

    gm = program(build).graph_module(0)
    splitting._mark(gm.graph, 1, 1)
    marked = [node.target for node in gm.graph.nodes if "custom" in node.meta]
    assert marked == [torch.ops.aten.split.Tensor, operator.getitem]


def test_only_graphs_are_inlined() -> None:
    gm = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(Unsupported, match="calls a Linear, which is no graph"):
        inline_submodules(gm)
