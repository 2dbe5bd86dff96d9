"""PyTorch's passes that make buckets as subjects: sound programs pass, planted defects and known ones are refuted."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tcverify import verify
from tcverify.errors import Unsupported
from tcverify.ops import lookup, resolve
from tcverify.ops.dialects.bucketing import native_pre_bucket_all_gather, pre_bucket_reduce_scatter
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, dumps, spmd_program
from tcverify.pytorch import SUBJECTS
from tcverify.pytorch.bucketing import separate_outputs, without_views_of_own_dtype
from tcverify.pytorch.functional_graphs import require_functional
from tcverify.strategies import DECODERS, all_meshes

TP2 = Mesh.grid({"tp": 2})
C10D = "_c10d_functional::"
WAIT = C10D + "wait_tensor"


def here(*names: str) -> list[Any]:
    return [
        pytest.param(one, marks=pytest.mark.skipif(not SUBJECTS[one].here, reason=f"this torch has no {one}"))
        for one in names
    ]


def subject(name: str, **options: Any) -> Any:
    import importlib

    module, _, attribute = SUBJECTS[name].target.partition(":")
    return getattr(importlib.import_module(module), attribute)(**options)


def inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[InputSpec]:
    return [InputSpec(f"p{i}", shape, dtype, (("tp", VARYING),)) for i, shape in enumerate(shapes)]


def gathers(b: GraphBuilder) -> Any:
    """Two gathers of parameters, of which the first is read before the second."""
    p, q = b.input("p0"), b.input("p1")
    first = b.call(WAIT, b.call(C10D + "all_gather_into_tensor", p, 2, "tp"))
    read = b.call("aten::neg", first)
    second = b.call(WAIT, b.call(C10D + "all_gather_into_tensor", q, 2, "tp"))
    return read, second


def scatters(b: GraphBuilder) -> Any:
    """Two reduce_scatters of gradients, straight to outputs."""
    operands = [b.input("p0"), b.input("p1")]
    return tuple(b.call(WAIT, b.call(C10D + "reduce_scatter_tensor", one, "sum", 2, "tp")) for one in operands)


def reductions(b: GraphBuilder) -> Any:
    operands = [b.input("p0"), b.input("p1")]
    return tuple(b.call(WAIT, b.call(C10D + "all_reduce", one, "sum", "tp")) for one in operands)


def summed(b: GraphBuilder) -> Any:
    one, other = scatters(b)
    return b.call("aten::add.Tensor", one, other)


SHAPES = ((4, 3), (2,))
PROGRAMS: dict[str, Callable[[], Program]] = {
    "bucket_all_gather": lambda: spmd_program(TP2, inputs(*SHAPES), gathers),
    "bucket_reduce_scatter": lambda: spmd_program(TP2, inputs(*SHAPES), scatters),
    "bucket_all_reduce": lambda: spmd_program(TP2, inputs(*SHAPES), reductions),
    "bucket_collectives": lambda: spmd_program(TP2, inputs(*SHAPES), gathers),
    "bucket_fsdp_all_gather": lambda: spmd_program(TP2, inputs(*SHAPES), gathers),
    "bucket_fsdp_reduce_scatter": lambda: spmd_program(TP2, inputs(*SHAPES), scatters),
    "pre_bucket_fsdp_collectives": lambda: spmd_program(TP2, inputs(*SHAPES), gathers),
    "dedup_fsdp_reduce_scatter": lambda: spmd_program(TP2, inputs((4, 3), (4, 3)), summed),
}


@pytest.mark.filterwarnings("default")  # torch may warn where it traces what it replaces a pattern by
@pytest.mark.parametrize("name", here(*PROGRAMS))
def test_sound_programs_are_changed_and_pass(name: str) -> None:
    verdict = verify(subject(name), PROGRAMS[name]())
    assert verdict.status == "passed", [(one.kind, one.detail[-600:]) for one in verdict.findings]
    assert verdict.changed


@pytest.mark.parametrize("mode", ["custom_ops", "custom_ops_multidtype"])
def test_gathers_through_ops_of_inductor_pass(mode: str) -> None:
    verdict = verify(subject("bucket_all_gather", mode=mode), PROGRAMS["bucket_all_gather"]())
    assert verdict.status == "passed"
    assert verdict.changed


@pytest.mark.parametrize("mode", ["custom_ops", "coalesced"])
def test_scatters_in_other_modes_pass(mode: str) -> None:
    verdict = verify(subject("bucket_reduce_scatter", mode=mode), PROGRAMS["bucket_reduce_scatter"]())
    assert verdict.status == "passed"
    assert verdict.changed


def _turned(made: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one.flip(0) if one.shape[0] > 1 else one for one in made]


@pytest.mark.parametrize(
    ("name", "merge"),
    [
        ("bucket_all_gather", "all_gather_merge_fn_to_trace"),
        ("bucket_reduce_scatter", "reduce_scatter_merge_fn_to_trace"),
        pytest.param(
            "bucket_all_reduce", "all_reduce_merge_fn_to_trace",
            marks=pytest.mark.skipif(not SUBJECTS["bucket_all_reduce"].here, reason="this torch has no bucket_all_reduce"),
        ),
    ],
)  # fmt: skip
def test_a_bucket_taken_apart_wrongly_is_refuted(name: str, merge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.fx_passes import bucketing

    sound = getattr(bucketing, merge)
    monkeypatch.setattr(bucketing, merge, functools.wraps(sound)(lambda *args: _turned(sound(*args))))
    verdict = verify(subject(name), PROGRAMS[name]())
    assert {one.kind for one in verdict.findings} == {"wrong-value"}


def test_a_key_without_the_group_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """PT-158632: collectives of several groups in one bucket."""
    from torch._inductor.fx_passes import bucketing

    mesh = Mesh.grid({"dp": 2, "tp": 2})

    def build(b: GraphBuilder) -> Any:
        operands = [(b.input("p0"), "dp"), (b.input("p1"), "tp")]
        return tuple(b.call(WAIT, b.call(C10D + "all_gather_into_tensor", one, 2, dim)) for one, dim in operands)

    varying = (("dp", VARYING), ("tp", VARYING))
    program = spmd_program(mesh, [InputSpec(f"p{i}", (2,), torch.float32, varying) for i in (0, 1)], build)
    assert verify(subject("bucket_all_gather"), program).status == "passed"
    sound = bucketing.greedy_bucket_collective_by_mb

    def blind(gm: Any, cap: Any, is_kind: Any, key: Any, *rest: Any, **more: Any) -> Any:
        found = sound(gm, cap, is_kind, lambda node: "one", *rest, **more)
        for node in (n for bucket in found for n in bucket):
            node.args = (*node.args[:-1], found[0][0].args[-1])
        return found

    monkeypatch.setattr(bucketing, "greedy_bucket_collective_by_mb", blind)
    verdict = verify(subject("bucket_all_gather"), program)
    assert verdict.status == "refuted"
    assert {one.kind for one in verdict.findings} & {"wrong-value", "pass-raised"}


def test_graphs_that_are_not_functional_are_declined() -> None:
    def build(b: GraphBuilder) -> Any:
        made = b.call("aten::neg", b.input("p0"))
        b.call("aten::mul_.Tensor", made, 2.0)
        return made

    program = spmd_program(TP2, inputs((2,)), build)
    with pytest.raises(Unsupported, match="writes in place"):
        require_functional(program.graphs[0])


def test_writes_into_inputs_at_the_end_are_functional() -> None:
    def build(b: GraphBuilder) -> Any:
        p, q = b.input("p0"), b.input("p1")
        made = b.call("aten::neg", p)
        b.call("aten::copy_", q, made)
        return made

    require_functional(spmd_program(TP2, inputs((2,), (2,)), build).graphs[0])


def test_outputs_of_one_bucket_get_memory_of_their_own() -> None:
    def build(b: GraphBuilder) -> Any:
        both = b.call("aten::split.Tensor", b.call("aten::neg", b.input("p0")), 2)
        return b.call("python::getitem", both, 0), b.call("python::getitem", both, 1)

    for known in (False, True):
        graph = spmd_program(TP2, inputs((4,)), build).graphs[0]
        separate_outputs(graph, set(graph.nodes) if known else set())
        clones = [node for node in graph.nodes if node.target == torch.ops.aten.clone.default]
        assert len(clones) == (0 if known else 2)


def test_outputs_that_shared_memory_before_the_pass_share_their_own() -> None:
    def build(b: GraphBuilder) -> Any:
        both = b.call("aten::split.Tensor", b.call("aten::neg", b.input("p0")), 2)
        first, second = b.call("python::getitem", both, 0), b.call("python::getitem", both, 1)
        return first, b.call("aten::slice.Tensor", first, 0, 0, 1), second

    graph = spmd_program(TP2, inputs((4,)), build).graphs[0]
    (view,) = graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    separate_outputs(graph, {view, *graph.find_nodes(op="placeholder")})
    first, sliced, second = graph.output_node().args[0]
    assert (first.target, second.target) == (torch.ops.aten.clone.default,) * 2
    assert (sliced, sliced.args[0]) == (view, first)


def test_what_a_coalesced_collective_returns_is_memory_of_its_own() -> None:
    def build(b: GraphBuilder) -> Any:
        p = b.input("p0")
        both = b.call("_c10d_functional::reduce_scatter_tensor_coalesced", [p, p], "sum", 2, "tp")
        first, second = b.call("python::getitem", both, 0), b.call("python::getitem", both, 1)
        return b.call("_c10d_functional::wait_tensor", first), b.call("_c10d_functional::wait_tensor", second)

    graph = spmd_program(TP2, inputs((4,)), build).graphs[0]
    separate_outputs(graph, set(graph.find_nodes(op="placeholder")))  # the pass has made all of it anew
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


def test_views_of_another_dtype_stay() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    same = graph.call_function(torch.ops.aten.view.dtype, (x, torch.float32))
    other = graph.call_function(torch.ops.aten.view.dtype, (same, torch.int32))
    graph.output(other)
    without_views_of_own_dtype(graph)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.view.dtype]
    assert other.args[0] is x


# -------------------------------------------------------------------------------------------- ops that buckets are made by


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("rank", [0, 1])
def test_buffers_of_all_gathers_are_filled_as_by_torch(dtypes: tuple[torch.dtype, torch.dtype], rank: int) -> None:
    name = "bucketing::_pre_bucket_all_gather"
    kernel = resolve(name)
    operands = [torch.arange(6.0).reshape(2, 3).to(dtypes[0]), torch.arange(4.0).to(dtypes[1]), torch.ones(0)]
    into = dtypes[1]
    names = [one.name for one in kernel._schema.arguments]
    from torch._inductor.fx_passes import bucketing

    known: dict[str, Any] = {
        "ag_ins": operands, "group_size": 2, "group_name": "tp", "dtype": into, "rank": rank, "foreach_group_indices": None,
    }  # fmt: skip
    if "out_dtype_ints" in names:
        known["out_dtype_ints"] = [bucketing._ALL_DTYPES.index(into)] * 3
    args = [known[one] for one in names]
    theirs, ours = kernel(*args), native_pre_bucket_all_gather(*args)
    assert (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype)
    mine = slice(10 * rank, 10 * (rank + 1))  # the rest is memory that nobody has written
    assert torch.equal(theirs[mine], ours[mine])
    assert ours[10 * (1 - rank) : 10 * (2 - rank)].isnan().all()
    assert lookup(kernel).run is not None


@pytest.mark.parametrize("shapes", [((4, 3), (2,)), ((2, 1, 2), (6,)), ((2, 2),)])
def test_operands_of_reduce_scatters_are_packed_as_by_torch(shapes: tuple[tuple[int, ...], ...]) -> None:
    operands = [torch.rand(shape) for shape in shapes]
    theirs = resolve("bucketing::_pre_bucket_reduce_scatter")(operands, 2)
    assert torch.equal(theirs, pre_bucket_reduce_scatter(operands, 2))


def test_operands_that_cannot_be_divided_are_filled_up() -> None:
    packed = pre_bucket_reduce_scatter([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])], 2)
    assert packed.tolist() == [1.0, 2.0, 4.0, 3.0, 0.0, 5.0]


# ------------------------------------------------------------------------------------------------------------- programs


def test_the_strategy_draws_what_buckets_are_made_of() -> None:
    decoder, draw = DECODERS["bucketing"], random.Random(1)
    found: set[str] = set()
    late = 0
    for mesh in (mesh for size in (2, 3, 4) for mesh in all_meshes(size)):
        for _ in range(5):
            program = decoder.decode(mesh, draw.randbytes(decoder.width))
            nodes = [node for graph in program.graphs for node in graph.nodes if node.op == "call_function"]
            found |= {str(node.target) for node in nodes}
            waits = [node for node in nodes if "wait_tensor" in str(node.target)]
            late += any(node.prev is not node.args[0] for node in waits)
            for graph in program.graphs:
                require_functional(graph)
    wanted = {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "wait_tensor"}
    assert {f"_c10d_functional.{one}.default" for one in wanted} <= found
    assert {"prims.convert_element_type.default", "aten.copy_.default", "aten.permute.default"} <= found
    assert late


def test_equal_bytes_give_equal_programs() -> None:
    decoder = DECODERS["bucketing"]
    choices = random.Random(2).randbytes(decoder.width)
    assert dumps(decoder.decode(TP2, choices)) == dumps(decoder.decode(TP2, choices))
    assert decoder.decode(TP2, b"").graphs
