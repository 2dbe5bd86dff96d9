"""Passes of torch behind autograd: they fire, keep what is sound, and what is planted in them is refuted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from tcverify.application.loading import load_pass
from tcverify.errors import Unsupported
from tcverify.ops import lookup
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch import SUBJECTS
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.functional_graphs import require_functional
from tcverify.pytorch.post_grad import Reinplace
from tcverify.strategies import DECODERS, all_meshes
from tcverify.verification.verifier import verify

TP2 = Mesh.grid({"tp": 2})
WAIT = "_c10d_functional::wait_tensor"
Build = Callable[[GraphBuilder, list[fx.Node]], Any]


def loaded(name: str) -> TorchPass:
    made: TorchPass = load_pass(SUBJECTS[name].target).subject
    return made


def program(build: Build, *shapes: tuple[int, ...], **options: Any) -> Program:
    """A program on two ranks whose inputs x0, x1, … have these shapes on each."""
    inputs = [InputSpec(f"x{i}", shape, placements=(("tp", VARYING),)) for i, shape in enumerate(shapes)]
    made = spmd_program(TP2, inputs, lambda b: build(b, [b.input(one.name) for one in inputs]))
    return replace(made, options=options)


def reduced(b: GraphBuilder, value: Any, op: str = "sum") -> Any:
    return b.call(WAIT, b.call("_c10d_functional::all_reduce", value, op, "tp"))


def updates(b: GraphBuilder, x: list[fx.Node]) -> Any:
    """Gradients that are copied into the parameters, as data-parallel training does it."""
    made = [reduced(b, b.call("aten::div.Tensor", gradient, 2)) for gradient in x[:2]]
    for parameter, gradient in zip(x[2:], made, strict=True):
        b.call("aten::copy_", parameter, gradient)
    return x[0]


def products(b: GraphBuilder, x: list[fx.Node]) -> Any:
    """A product behind a gather, and one before a scatter."""
    whole = b.call(WAIT, b.call("_c10d_functional::all_gather_into_tensor", x[0], 2, "tp"))
    made = b.call("aten::mm", whole, x[1])
    inner = b.call("aten::relu", made)
    part = b.call("_c10d_functional::reduce_scatter_tensor", b.call("aten::mm", inner, x[1]), "sum", 2, "tp")
    return [made, b.call(WAIT, part)]


def dying(b: GraphBuilder, x: list[fx.Node]) -> Any:
    """A sum that nobody but a collective reads."""
    return reduced(b, b.call("aten::add.Tensor", x[0], x[0]))


def targets(subject: str, subject_program: Program) -> list[str]:
    """The ops of the graph of rank 0 as the subject leaves it, once the whole program has been verified."""
    one = loaded(subject)
    verdict = verify(one, subject_program)
    assert verdict.status == "passed", (verdict.doubts, verdict.findings)
    (given, *_) = subject_program.graph_modules()
    rewritten = one(given)
    graph = given.graph if rewritten is None else rewritten.graph
    return [lookup(node.target).name for node in graph.nodes if node.op == "call_function"]


def test_sums_are_reduced_in_place() -> None:
    assert "_c10d_functional::all_reduce_" in targets("reinplace", program(dying, (2, 2)))


def test_all_that_stands_behind_autograd() -> None:
    assert "_c10d_functional::all_reduce_" in targets("post_grad_passes", program(dying, (2, 2)))


def test_joint_graphs_lose_what_does_nothing() -> None:
    def copied(b: GraphBuilder, x: list[fx.Node]) -> Any:
        return reduced(b, b.call("aten::clone", b.call("aten::add.Tensor", x[0], 1)))

    assert "aten::clone" not in targets("joint_graph_passes", program(copied, (2, 2)))


@pytest.mark.parametrize("mode", ["concat", "coalesced"])
def test_gradients_are_reduced_together(mode: str) -> None:
    passes = f"fuse_ddp_with_{mode}_op"
    told = program(updates, (2, 2), (2, 2), (2, 2), (2, 2), passes=passes)
    found = targets("ddp_fusion", told)
    assert found.count("_c10d_functional::all_reduce") == (1 if mode == "concat" else 0)
    assert found.count("_c10d_functional::all_reduce_coalesced") == (0 if mode == "concat" else 1)


def test_products_swallow_collectives() -> None:
    found = targets("micro_pipeline_tp", program(products, (2, 4), (4, 4)))
    assert {"symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter"} <= set(found)
    assert not any(name.startswith("_c10d_functional") for name in found)


SUMS = "batch_aten_add+batch_aten_sub+batch_aten_mul+batch_aten_div"


def test_like_ops_become_one_of_a_batch() -> None:
    def sums(b: GraphBuilder, x: list[fx.Node]) -> Any:
        return [reduced(b, b.call("aten::add.Tensor", one, x[2])) for one in x[:2]]

    told = program(sums, (2, 2), (2, 2), (2, 2), fusions=SUMS)
    assert targets("post_grad_fusions", told).count("aten::add.Tensor") == 1
    fewer = program(sums, (2, 2), (2, 2), (2, 2), fusions=SUMS, min_fuse_set_size=5)
    assert targets("post_grad_fusions", fewer).count("aten::add.Tensor") == 2


def test_a_split_and_the_join_behind_it_go() -> None:
    def there_and_back(b: GraphBuilder, x: list[fx.Node]) -> Any:
        parts = b.call("aten::split.Tensor", reduced(b, x[0]), 1)
        return b.call("aten::cat", [b.getitem(parts, 0), b.getitem(parts, 1)])

    told = program(there_and_back, (2, 2), fusions="normalization_aten_pass+split_cat_aten_pass")
    assert "aten::split_with_sizes" not in targets("post_grad_fusions", told)


def test_a_planted_fusion_of_what_reads_its_own_result_is_refuted() -> None:
    """All is taken to be independent that is alike."""
    from torch._inductor.fx_passes import group_batch_fusion

    def chain(b: GraphBuilder, x: list[fx.Node]) -> Any:
        return [
            first := b.call("aten::mul.Tensor", x[0], x[1]),
            b.call("aten::add.Tensor", first, b.call("aten::mul.Tensor", first, x[1])),
        ]

    sound = program(chain, (2, 2), (2, 2), fusions=SUMS)
    assert verify(loaded("post_grad_fusions"), sound).status == "passed"

    def careless(nodes: Any, options: Any) -> Any:
        yield list(nodes)

    with mock.patch.object(group_batch_fusion, "find_independent_subset_greedy", careless):
        assert verify(loaded("post_grad_fusions"), sound).status == "refuted"


@pytest.mark.parametrize("subject", ["reinplace_fsdp_all_gather"])
def test_fsdp_graphs(subject: str) -> None:
    if not SUBJECTS[subject].here:
        pytest.skip("this torch has no such pass: it was dropped behind 2.11")
    decoder, passed = DECODERS["fsdp"], 0
    one = loaded(subject)
    for number in range(12):
        drawn = decoder.decode(TP2, bytes(number * 37 * (i + 1) % 256 for i in range(decoder.width)))
        passed += verify(one, drawn).status == "passed"
    assert passed >= 6


def test_a_planted_defect_is_refuted() -> None:
    """Reductions in place of what others read later."""

    def read_later(b: GraphBuilder, x: list[fx.Node]) -> Any:
        value = b.call("aten::add.Tensor", x[0], x[0])
        made = reduced(b, value)
        return [made, b.call("aten::mul.Tensor", value, 3)]

    sound = program(read_later, (2, 2))
    assert verify(loaded("reinplace"), sound).status == "passed"

    def careless(self: Reinplace, gm: fx.GraphModule, options: Any) -> None:
        for node in gm.graph.nodes:
            if node.target is torch.ops._c10d_functional.all_reduce.default:
                node.target = torch.ops._c10d_functional.all_reduce_.default

    with mock.patch.object(Reinplace, "rewrite", careless):
        verdict = verify(loaded("reinplace"), sound)
    assert verdict.status == "refuted"
    assert {"wrong-value", "wrong-alias"} & {finding.kind for finding in verdict.findings}


def test_a_planted_bucket_of_two_reductions_is_refuted() -> None:
    """All gradients are reduced as the last of them is."""

    def two_ways(b: GraphBuilder, x: list[fx.Node]) -> Any:
        found = [reduced(b, b.call("aten::div.Tensor", y, 2), op) for y, op in zip(x[:2], ("sum", "max"), strict=True)]
        for parameter, made in zip(x[2:], found, strict=True):
            b.call("aten::copy_", parameter, made)
        return x[0]

    verdict = verify(loaded("ddp_fusion"), program(two_ways, (2, 2), (2, 2), (2, 2), (2, 2)))
    assert {finding.kind for finding in verdict.findings} >= {"wrong-value"}


def test_a_result_that_outlives_the_input_it_was_written_into() -> None:
    """Found in torch: `y = all_reduce(x); x.copy_(z); return y` returns z."""

    def outlives(b: GraphBuilder, x: list[fx.Node]) -> Any:
        made = reduced(b, x[0])
        b.call("aten::copy_", x[0], x[1])
        return made

    verdict = verify(loaded("reinplace"), program(outlives, (2, 2), (2, 2)))
    assert {finding.kind for finding in verdict.findings} >= {"wrong-value"}


def test_graphs_that_write_are_declined() -> None:
    def writes(b: GraphBuilder, x: list[fx.Node]) -> Any:
        value = b.call("aten::add.Tensor", x[0], 1)
        b.call("aten::mul_.Tensor", value, 2)
        return reduced(b, value)

    writing = program(writes, (2, 2))
    with pytest.raises(Unsupported, match="writes in place"):
        require_functional(writing.graph_modules()[0].graph)
    assert verify(loaded("reinplace"), writing).status == "inconclusive"


def test_inputs_are_written_once_and_by_other_values() -> None:
    """As AOTAutograd does it. Shrinking would write them otherwise, and then show what no user meets."""

    def copies(*pairs: tuple[int, int]) -> Build:
        def build(b: GraphBuilder, x: list[fx.Node]) -> Any:
            for target, source in pairs:
                b.call("aten::copy_", x[target], x[source])
            return x[0]

        return build

    require_functional(program(copies((0, 1), (1, 2)), (2, 2), (2, 2), (2, 2)).graph_modules()[0].graph)
    for pairs in (((0, 0),), ((0, 1), (0, 2))):
        with pytest.raises(Unsupported, match="again or into itself"):
            require_functional(program(copies(*pairs), (2, 2), (2, 2), (2, 2)).graph_modules()[0].graph)


def test_programs_of_the_strategy_are_functional() -> None:
    decoder = DECODERS["compiled"]
    labels = set()
    for number in range(60):
        mesh = all_meshes(2 + number % 3)[number % 5]
        drawn = decoder.decode(mesh, bytes((number + 1) * 41 * (i + 3) % 256 for i in range(decoder.width)))
        for module in drawn.graph_modules():
            require_functional(module.graph)
        labels |= set(drawn.labels)
    assert labels >= {"update", "gradients", "scatter", "gather-product", "product-scatter", "swap", "waited-twice"}
