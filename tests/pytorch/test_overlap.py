"""PyTorch's passes that overlap and replace communication: sound programs pass, planted defects are refuted."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from tcverify import verify
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, RankBinding, spmd_program
from tcverify.pytorch import PREFIX, SUBJECTS
from tcverify.pytorch.compat import filter_known_options
from tcverify.pytorch.control_deps import plain_order
from tcverify.pytorch.overlap import ManualOverlapBucketing, ScheduleOverlapBucketing, plan_of
from tcverify.pytorch.substituting import DecompComms, LowContentionCollectives

MESH = Mesh.grid({"dp": 2})


def needs(name: str) -> pytest.MarkDecorator:
    one = SUBJECTS[name]
    return pytest.mark.skipif(not one.here, reason=f"torch {torch.__version__} has no {one.source}")


def two_gathers(b: GraphBuilder) -> Any:
    """Two gathered weights, each multiplied with."""
    x, first, second = b.input("x"), b.input("first"), b.input("second")
    for part in (first, second):
        started = b.call("_c10d_functional::all_gather_into_tensor", part, 2, "dp")
        x = b.call("aten::mm", x, b.call("_c10d_functional::wait_tensor", started))
    return x


def overlapping(**options: Any) -> Program:
    inputs = [
        InputSpec("x", (4, 4)),
        *(InputSpec(name, (2, 4), placements=(("dp", VARYING),)) for name in ("first", "second")),
    ]
    program = spmd_program(MESH, inputs, two_gathers)
    return Program(program.mesh, program.graphs, program.ranks, program.inputs, options=options)


def starts_before_first_product(gm: fx.Graph) -> int:
    found = 0
    for node in gm.nodes:
        if node.target is torch.ops.aten.mm.default:
            return found
        found += node.target is torch.ops._c10d_functional.all_gather_into_tensor.default
    return found


@needs("schedule_overlap_bucketing")
@pytest.mark.parametrize("estimates", SUBJECTS["schedule_overlap_bucketing"].draws["estimates"])
@pytest.mark.parametrize("deps", [False, True])
def test_a_gather_moves_beside_the_product_before_it(estimates: str, deps: bool) -> None:
    program = overlapping(estimates=estimates, insert_overlap_deps=deps, pre_bucketing_fsdp_collectives=False)
    verdict = verify(ScheduleOverlapBucketing(), program)
    assert verdict.status == "passed", [finding.kind for finding in verdict.findings]
    assert starts_before_first_product(program.graph(0)) == 1
    assert starts_before_first_product(verdict.pair.rewritten.graph(0)) == 2


@needs("schedule_overlap_bucketing")
@pytest.mark.parametrize(("ratio", "started"), [(1.0, 2), (0.0, 1)])
def test_a_budget_is_a_share_of_the_memory_that_values_of_the_cpu_take(ratio: float, started: int) -> None:
    limits = {"max_memory_increase_gb": 0.0, "max_memory_increase_ratio": ratio}
    verdict = verify(ScheduleOverlapBucketing(), overlapping(pre_bucketing_fsdp_collectives=False, **limits))
    assert verdict.status == "passed", [finding.kind for finding in verdict.findings]
    assert starts_before_first_product(verdict.pair.rewritten.graph(0)) == started


@needs("schedule_overlap_bucketing")
def test_a_scheduler_that_forgets_waits_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.fx_passes import overlap_scheduling

    real = overlap_scheduling.schedule_overlap_bucketing

    def forgetful(gm: fx.GraphModule, **options: Any) -> fx.GraphModule:
        made = real(gm, **options)
        wait = made.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default)[0]
        wait.replace_all_uses_with(wait.args[0])
        made.graph.erase_node(wait)
        return made

    monkeypatch.setattr(overlap_scheduling, "schedule_overlap_bucketing", forgetful)
    verdict = verify(ScheduleOverlapBucketing(), overlapping())
    assert verdict.status == "refuted"
    assert {"missing-wait", "async-race"} & {finding.kind for finding in verdict.findings}


@needs("manual_overlap_bucketing")
@pytest.mark.parametrize("plan", SUBJECTS["manual_overlap_bucketing"].draws["plan"])
def test_modules_are_bucketed_and_the_result_is_the_same(plan: str) -> None:
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    if not filter_known_options(manual_overlap_bucketing, {"bucket_mode": "default"}):
        pytest.skip(
            "this torch has one mode of buckets alone: it views values as bytes, which no number domain carries"
        )
    verdict = verify(ManualOverlapBucketing(bucket_mode="default"), overlapping(plan=plan))
    assert verdict.status == "passed", [finding.kind for finding in verdict.findings]


def returned_reductions(b: GraphBuilder) -> Any:
    """Two reductions, which a bucket holds side by side, and a view of the first: all are returned, behind a gathered weight."""
    values, weight = (b.input("x"), b.input("y")), b.input("weight")
    gathered = b.call("_c10d_functional::all_gather_into_tensor", weight, 2, "dp")
    b.call("_c10d_functional::wait_tensor", gathered)
    starts = [b.call("_c10d_functional::all_reduce", value, "sum", "dp") for value in values]
    first, second = (b.call("_c10d_functional::wait_tensor", start) for start in starts)
    return first, b.call("aten::slice.Tensor", first, 0, 0, 1), second


BY_HAND = pytest.param(
    ManualOverlapBucketing,
    marks=pytest.mark.skipif(
        not SUBJECTS["pre_bucket_fsdp_collectives"].here,
        reason="this torch reads buckets as bytes, which number domains do not carry",
    ),
)


@pytest.mark.parametrize(
    "subject", [pytest.param(ScheduleOverlapBucketing, marks=needs("pre_bucket_fsdp_collectives")), BY_HAND]
)
def test_outputs_share_memory_as_before_where_a_bucket_holds_them(subject: Any) -> None:
    inputs = [InputSpec(name, (2, 4), placements=(("dp", VARYING),)) for name in ("x", "y", "weight")]
    options = (
        {"pre_bucketing_fsdp_collectives": True}
        if subject is ScheduleOverlapBucketing
        else {"plan": "one", "bucket_mode": "default"}
    )
    program = replace(spmd_program(MESH, inputs, returned_reductions), options=options)
    verdict = verify(subject(), program)
    assert verdict.status == "passed", verdict
    assert verdict.changed


def waited_twice(b: GraphBuilder) -> Any:
    x = b.input("x")
    started = [b.call("_c10d_functional::all_reduce", x, op, "dp") for op in ("sum", "max")]
    waits = [b.call("_c10d_functional::wait_tensor", one) for one in (*started, started[0])]
    return b.call("aten::mm", waits[0], waits[1]), waits[2]


def written(b: GraphBuilder) -> Any:
    x = b.input("x")
    before = b.call("aten::abs", x)
    b.call("aten::add_.Tensor", x, x)
    return b.call("_c10d_functional::wait_tensor", b.call("_c10d_functional::all_reduce", before, "sum", "dp"))


@needs("schedule_overlap_bucketing")
@pytest.mark.parametrize("subject", [ScheduleOverlapBucketing, ManualOverlapBucketing])
def test_graphs_come_as_post_grad_passes_leaves_them(subject: Any) -> None:
    from torch._inductor.fx_passes import bucketing

    inputs = [InputSpec("x", (2, 2), placements=(("dp", VARYING),))]
    assert verify(subject(), spmd_program(MESH, inputs, written)).status == "inconclusive"
    if hasattr(bucketing, "deduplicate_wait_tensors"):
        verdict = verify(subject(), spmd_program(MESH, inputs, waited_twice))
        assert verdict.status == "passed", [finding.kind for finding in verdict.findings]


def test_plans_name_every_module_once() -> None:
    assert plan_of(["a", "b", "c"], "each") == ["a", "b", "c"]
    assert plan_of(["a", "b", "c"], "pairs") == [["a", "b"], ["c"]]
    assert plan_of(["a", "b", "c"], "one") == [["a", "b", "c"]]


def wrapped() -> fx.GraphModule:
    """`sub` in a graph of its own, behind `add`, which it does not read."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(torch.ops.aten.add.Tensor, (x, y))
    second = graph.call_function(torch.ops.aten.sub.Tensor, (y, x), {"alpha": 2})
    graph.output((first, second))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    preserve_node_ordering(gm.graph, {second: OrderedSet([first])})
    return gm


@needs("schedule_overlap_bucketing")
def test_ops_under_control_deps_return_with_their_order() -> None:
    gm = wrapped()
    assert plain_order(gm) == 1
    gm.recompile()
    calls = {node.name: node for node in gm.graph.nodes if node.op == "call_function"}
    assert list(calls) == ["add_tensor", "sub_tensor"]
    assert calls["sub_tensor"].meta["after"] == ["add_tensor"]
    assert not [node for node in gm.graph.nodes if node.op == "get_attr"]
    first, second = gm(torch.tensor(5.0), torch.tensor(1.0))
    assert (first, second) == (6.0, -9.0)
    assert plain_order(gm) == 0


def scattered(reduce_op: str) -> Program:
    def build(b: GraphBuilder) -> Any:
        started = b.call("_c10d_functional::reduce_scatter_tensor", b.input("x"), reduce_op, 2, "dp")
        return b.call("_c10d_functional::wait_tensor", started)

    return spmd_program(MESH, [InputSpec("x", (4, 3), placements=(("dp", VARYING),))], build)


@needs("low_contention_collectives")
def test_low_contention_collectives_mean_the_same() -> None:
    verdict = verify(LowContentionCollectives(), scattered("avg"))
    assert verdict.status == "passed"
    assert verdict.changed
    assert any("_low_contention_reduce_scatter" in str(node.target) for node in verdict.pair.rewritten.graph(0).nodes)


@needs("low_contention_collectives")
def test_a_maximum_has_no_low_contention_form() -> None:
    verdict = verify(LowContentionCollectives(), scattered("max"))
    assert [finding.kind for finding in verdict.findings] == ["rewritten-raises"]


def grams(
    last: Callable[[GraphBuilder, fx.Node], fx.Node], picked: Callable[[int], int] = lambda rank: rank
) -> Program:
    """Two Newton-Schulz steps over gathered rows, something else, and back to the rows of a rank."""
    inputs = {"shard": InputSpec("shard", (4, 3), placements=(("dp", VARYING),))}
    graphs = []
    for rank in (0, 1):
        b = GraphBuilder(MESH, inputs, rank)
        started = b.call("_c10d_functional::all_gather_into_tensor", b.input("shard"), 2, "dp")
        x = b.call("_c10d_functional::wait_tensor", started)
        for _ in range(2):
            gram = b.call("aten::mm", b.call("aten::permute", x, [1, 0]), x)
            x = b.call("aten::mm", x, b.call("aten::mul.Tensor", gram, 0.1))
        parts = b.call("aten::split.Tensor", last(b, x), 4)
        graphs.append(b.finish((b.call("aten::mul.Tensor", b.getitem(parts, picked(rank)), 0.5),)))
    ranks = tuple(RankBinding(rank, {}) for rank in (0, 1))
    return Program(MESH, tuple(graphs), ranks, tuple(inputs.values()))


SOUND: dict[str, Callable[[GraphBuilder, fx.Node], fx.Node]] = {
    "nothing": lambda b, x: x,
    "norms of columns": lambda b, x: b.call("aten::div.Tensor", x, b.call("aten::linalg_vector_norm", x, 2, [0])),
    "sums of rows": lambda b, x: b.call("aten::sub.Tensor", x, b.call("aten::sum.dim_IntList", x, [1], True)),
}
WRONG: dict[str, Callable[[GraphBuilder, fx.Node], fx.Node]] = {
    "softmax of columns": lambda b, x: b.call("aten::_softmax", x, 0, False),
    "sums of columns behind a transpose": lambda b, x: b.call(
        "aten::sub.Tensor", x, b.call("aten::sum.dim_IntList", b.call("aten::permute", x, [1, 0]), [1])
    ),
    "another product over the rows": lambda b, x: b.call(
        "aten::mm", x, b.call("aten::mm", b.call("aten::permute", b.call("aten::tanh", x), [1, 0]), x)
    ),
    "norm of a norm": lambda b, x: b.call(
        "aten::div.Tensor", x,
        b.call("aten::linalg_vector_norm", b.call("aten::linalg_vector_norm", x, 2, [0]), 2),
    ),
}  # fmt: skip


@needs("decomp_comms")
@pytest.mark.parametrize("last", SOUND)
def test_gram_matrices_of_divided_rows_are_right(last: str) -> None:
    verdict = verify(DecompComms(), grams(SOUND[last]))
    assert verdict.status == "passed"
    assert verdict.changed


@needs("decomp_comms")
@pytest.mark.parametrize("last", WRONG)
def test_what_decomp_comms_gets_wrong_is_refuted(last: str) -> None:
    verdict = verify(DecompComms(), grams(WRONG[last]))
    assert [finding.kind for finding in verdict.findings] == ["wrong-value"]


@needs("decomp_comms")
def test_ranks_that_are_rewritten_otherwise_are_refuted() -> None:
    verdict = verify(DecompComms(), grams(SOUND["nothing"], picked=lambda _: 0))
    assert "collective-mismatch" in {finding.kind for finding in verdict.findings}


def test_subjects_suit_programs_that_give_them_work() -> None:
    from tcverify.strategies import DECODERS

    for name in (
        "schedule_overlap_bucketing",
        "manual_overlap_bucketing",
        "low_contention_collectives",
        "decomp_comms",
    ):
        assert SUBJECTS[name].strategy in DECODERS, PREFIX + name


def test_traced_programs_write_nothing_and_gram_programs_return_rows() -> None:
    import random

    from tcverify.strategies import DECODERS

    for seed in range(40):
        choices = random.Random(seed).randbytes(400)
        traced = DECODERS["traced"].decode(MESH, choices)
        for node in traced.graph(0).nodes:
            schema = getattr(node.target, "_schema", None)
            assert schema is None or not schema.is_mutable or "wait_tensor" in str(node.target), node
        gram = DECODERS["gram"].decode(MESH, choices)
        targets = {node.target for node in gram.graph(0).nodes}
        assert {torch.ops.aten.split.Tensor, operator.getitem} <= targets, seed
