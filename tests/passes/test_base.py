"""The base of passes: options, enable flag and its guards, dump, what is erased; placements; the identity; the registry."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.errors import UsageError
from tcverify.passes import BUILTIN, DESCRIPTIONS, OVERLAP_PASSES, Identity, Pass, SequenceParallel, disable_passes
from tcverify.passes.editing import erase_unused, infer_metadata, known_spec, named_arguments, set_argument
from tcverify.passes.placements import Placements, propagate
from tcverify.passes.storages import mutated_nodes
from tcverify.program import (
    PARTIAL,
    REPLICATED,
    VARYING,
    GraphBuilder,
    InputSpec,
    Mesh,
    Program,
    Recipe,
    shard,
    spmd_program,
)

TP2 = Mesh.grid({"tp": 2})
GRID = Mesh.grid({"dp": 2, "tp": 2})


def build(body: Any, mesh: Mesh = TP2) -> Program:
    """x partial, r replicated, v varying, s sharded on dim 0, all [4, 8] globally; w a norm weight."""
    specs = [
        InputSpec("x", (4, 8), placements=(("tp", PARTIAL),)),
        InputSpec("r", (4, 8)),
        InputSpec("v", (4, 8), placements=(("tp", VARYING),)),
        InputSpec("s", (4, 8), placements=(("tp", shard(0)),)),
        InputSpec("w", (8,), recipe=Recipe("norm_weight")),
    ]
    return spmd_program(mesh, specs, lambda b: body(b, {spec.name: b.input(spec.name) for spec in specs}))


def fires(b: GraphBuilder, i: dict[str, fx.Node]) -> fx.Node:
    return b.call("tensor_cast::rms_norm", all_reduce(b, i["x"]), i["w"], 1e-6)


def all_reduce(b: GraphBuilder, value: fx.Node, dim: str = "tp") -> fx.Node:
    return b.call("tensor_cast::all_reduce", value, b.rank, b.group(dim))


def node(graph: fx.Graph, name: str) -> fx.Node:
    return next(n for n in graph.nodes if n.name == name)


# -------------------------------------------------------------------------------------------------- flag and its guards


def test_a_disabled_pass_touches_nothing() -> None:
    gm = build(fires).graph_module(0)
    code = gm.code
    pass_ = SequenceParallel(enabled=False)
    assert pass_(gm) is gm
    assert gm.code == code
    assert not any(pass_.rewrites.values())


def test_the_guard_of_an_instance_restores_the_flag_even_after_an_error() -> None:
    pass_ = SequenceParallel()
    seen = []
    with suppress(KeyError), pass_.disabled():
        seen.append(pass_.enabled)
        raise KeyError
    assert [*seen, pass_.enabled] == [False, True]


def test_the_guard_leaves_a_pass_off_that_was_off() -> None:
    pass_ = SequenceParallel(enabled=False)
    with pass_.disabled():
        pass
    assert not pass_.enabled


def test_the_guard_over_names_reaches_every_instance_and_nests() -> None:
    program, pass_ = build(fires), SequenceParallel()
    with disable_passes("sequence_parallel"):
        with disable_passes("identity"):
            pass_(program.graph_module(0))
            assert not any(pass_.rewrites.values())
        pass_(program.graph_module(0))
        assert not any(pass_.rewrites.values())
    pass_(program.graph_module(0))
    assert pass_.rewrites == {"P1": 1, "P2": 0, "P3": 0, "P4": 0, "P5": 0}


def test_the_guard_over_names_leaves_others_on() -> None:
    pass_ = SequenceParallel()
    with disable_passes("identity"):
        pass_(build(fires).graph_module(0))
    assert pass_.rewrites == {"P1": 1, "P2": 0, "P3": 0, "P4": 0, "P5": 0}


def test_the_guard_over_names_is_lifted_after_an_error() -> None:
    pass_ = SequenceParallel()
    with pytest.raises(KeyError), disable_passes("sequence_parallel"):
        raise KeyError
    pass_(build(fires).graph_module(0))
    assert pass_.rewrites == {"P1": 1, "P2": 0, "P3": 0, "P4": 0, "P5": 0}


# -------------------------------------------------------------------------------------------------------------- options


def test_options_come_as_strings() -> None:
    assert not SequenceParallel(enabled="False").enabled
    assert SequenceParallel(enabled="true", patterns=" P1 ").patterns == {"P1"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enabled": "maybe"}, "option enabled of pass 'sequence_parallel' cannot be 'maybe'"),
        ({"enabled": 2}, "option enabled of pass 'sequence_parallel' cannot be 2"),
        ({"patterns": "P9"}, "there is no 'P9'"),
        ({"patterns": ""}, "there is no ''"),
        ({"patterns": 1}, "there is no 1"),
        ({"pattern": "P1"}, "pass 'sequence_parallel' has no option 'pattern'"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        SequenceParallel(**options)
    assert said in raised.value.message
    assert raised.value.hint


def test_unknown_options_are_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="dump, enabled, patterns"):
        SequenceParallel(verbose="1")


# ----------------------------------------------------------------------------------------------------------------- dump


def test_every_call_dumps_the_program_after_the_pass(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "here"
    pass_ = SequenceParallel(dump=str(directory))
    for rank in (0, 1):
        pass_(build(fires).graph_module(rank))
    texts = [path.read_text() for path in sorted(directory.iterdir())]
    assert [path.name for path in sorted(directory.iterdir())] == [
        "sequence_parallel-0000.txt",
        "sequence_parallel-0001.txt",
    ]
    assert all("P1: 1" in text and "reduce_scatter" in text for text in texts)


def test_a_dump_directory_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write its dump to"):
        SequenceParallel(dump=tmp_path / "file" / "below")


def test_a_dump_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    pass_ = Identity(dump=directory)
    directory.rmdir()
    with pytest.raises(UsageError, match=r"gone/identity-0000\.txt"):
        pass_(build(fires).graph_module(0))


# ----------------------------------------------------------------------------------------- identity, registry, contract


def test_the_identity_changes_nothing() -> None:
    gm = build(fires).graph_module(0)
    before = [(n.name, n.args, id(n.meta.get("val"))) for n in gm.graph.nodes]
    assert Identity()(gm) is gm
    assert [(n.name, n.args, id(n.meta.get("val"))) for n in gm.graph.nodes] == before
    assert Identity.contract.identity


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_passes_are_made_by_name(name: str) -> None:
    pass_ = BUILTIN[name](enabled="true")
    assert pass_.name == name
    assert DESCRIPTIONS[name]
    assert pass_.contract.idempotent or name in OVERLAP_PASSES or name == "reorder_for_compute_comm_overlap"


def test_every_description_is_of_a_built_in_pass() -> None:
    assert list(DESCRIPTIONS) == list(BUILTIN)


def test_the_module_runs_what_the_graph_says_after_the_pass() -> None:
    gm = SequenceParallel()(build(fires).graph_module(0))
    assert "reduce_scatter" in gm.code


# -------------------------------------------------------------------------------------------------------------- erasing


class Bypass(Pass):
    """Lets readers of the first relu read its operand."""

    name = "bypass"
    PATTERNS = ("relu",)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        found = node(graph, "relu")
        found.replace_all_uses_with(found.all_input_nodes[0])
        self.rewrites["relu"] += 1
        return [found]


def test_what_the_rewrite_left_without_readers_goes_with_what_only_it_read() -> None:
    def body(b: GraphBuilder, i: dict[str, fx.Node]) -> Any:
        return b.call("aten::mul.Tensor", b.call("aten::relu", b.call("aten::neg", i["r"])), i["r"])

    class ToInput(Bypass):
        def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
            found = node(graph, "relu")
            found.replace_all_uses_with(node(graph, "r"))
            self.rewrites["relu"] += 1
            return [found]

    gm = ToInput()(build(body).graph_module(0))
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == ["mul"]


def test_a_collective_that_was_unused_before_stays() -> None:
    gm = build(lambda b, i: b.call("aten::relu", i["r"])).graph_module(0)
    with gm.graph.inserting_before(node(gm.graph, "relu")):
        gm.graph.call_function(torch.ops.tensor_cast.all_reduce.default, (node(gm.graph, "x"), 0, [0, 1]))
    Bypass()(gm)
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == ["all_reduce_default"]


def test_a_write_into_an_operand_is_never_erased() -> None:
    gm = build(lambda b, i: (b.call("aten::add_.Tensor", i["r"], i["v"]), i["r"])).graph_module(0)
    written = node(gm.graph, "add_")
    written.replace_all_uses_with(node(gm.graph, "r"))
    erase_unused(gm.graph, [written])
    assert written in gm.graph.nodes


# ------------------------------------------------------------------------------------------------------------- metadata


def test_annotate_gives_views_their_operands_storage_and_results_their_own() -> None:
    graph = build(lambda b, i: b.call("aten::relu", i["r"])).graph(0)
    r = node(graph, "r")
    with graph.inserting_after(r):
        view = graph.call_function(torch.ops.aten.slice.Tensor, (r, 0, 2, 4))
        fresh = graph.call_function(torch.ops.aten.neg.default, (r,))
    infer_metadata(view)
    infer_metadata(fresh)
    assert view.meta["val"].untyped_storage()._cdata == r.meta["val"].untyped_storage()._cdata
    assert (view.meta["val"].shape, view.meta["val"].storage_offset()) == ((2, 8), 16)
    assert fresh.meta["val"].untyped_storage()._cdata != r.meta["val"].untyped_storage()._cdata
    assert fresh.meta["val"].fake_mode is r.meta["val"].fake_mode


def test_annotate_keeps_the_device_of_the_graph() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    with mode:
        x.meta["val"] = torch.empty(2, 3, device="cuda:0")
    relu = graph.call_function(torch.ops.aten.relu.default, (x,))
    infer_metadata(relu)
    assert relu.meta["val"].device == torch.device("cuda:0")


def test_arguments_are_found_by_name_however_they_are_passed() -> None:
    graph = build(fires).graph(0)
    norm = node(graph, "rms_norm")
    norm.kwargs = {"eps": norm.args[2], "weight": norm.args[1]}
    norm.args = norm.args[:1]
    assert named_arguments(norm)["weight"] is node(graph, "w")
    set_argument(norm, "weight", node(graph, "r"))
    set_argument(norm, "x", node(graph, "v"))
    assert norm.kwargs["weight"] is node(graph, "r")
    assert norm.args == (node(graph, "v"),)


def test_keyword_arguments_do_not_hide_a_pattern() -> None:
    def body(b: GraphBuilder, i: dict[str, fx.Node]) -> fx.Node:
        reduced = b.call("tensor_cast::all_reduce", i["x"], rank=b.rank, rank_group=b.group("tp"))
        return b.call("tensor_cast::add_rms_norm", reduced, residual=i["r"], weight=i["w"], eps=1e-6)

    pass_ = SequenceParallel()
    pass_(build(body).graph_module(1))
    assert pass_.rewrites == {"P1": 1, "P2": 0, "P3": 0, "P4": 0, "P5": 0}


def test_symbolic_and_missing_metadata_are_unknown() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert known_spec(x) is None
    mode = torch._subclasses.fake_tensor.FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv())
    x.meta["val"] = mode.from_tensor(torch.empty(3, 4))
    assert known_spec(x) is None


# ----------------------------------------------------------------------------------------------------------- placements


def facts(body: Any, mesh: Mesh = TP2, rank: int = 0) -> tuple[fx.Node, Placements]:
    """What is known of the output of a program."""
    graph = build(body, mesh).graph(rank)
    result = next(iter(reversed(graph.nodes))).args[0]
    assert isinstance(result, fx.Node)
    return result, propagate(graph)


@pytest.mark.parametrize(
    ("name", "expected"), [("x", VARYING), ("r", REPLICATED), ("v", VARYING), ("s", shard(0)), ("w", REPLICATED)]
)
def test_facts_of_inputs(name: str, expected: object) -> None:
    result, found = facts(lambda b, i: i[name])
    assert found.placement(result, (0, 1)) == expected


def fp8_linear(b: GraphBuilder, x: fx.Node, w: fx.Node, *group: Any) -> fx.Node:
    """One product, with the scales that every op knows: of one element, equal on all ranks."""
    scale = b.call("aten::mean", w)
    op = "tensor_cast::fp8_linear_all_reduce" if group else "tensor_cast::fp8_linear"
    return b.call(op, x, b.call("aten::t", w), scale, scale, None, torch.float32, *group)


REPLICATING: dict[str, Any] = {
    "quantised linear": lambda b, i: fp8_linear(b, i["r"], i["r"]),
    "quantised linear with its sum": lambda b, i: fp8_linear(b, i["v"], i["r"], b.rank, b.group("tp")),
    "all_reduce": lambda b, i: all_reduce(b, i["x"]),
    "all_gather": lambda b, i: b.call("tensor_cast::all_gather", i["s"], 0, b.rank, b.group("tp")),
    "elementwise": lambda b, i: b.call("aten::add.Tensor", i["r"], b.call("aten::mul.Tensor", i["r"], 0.5)),
    "matmul": lambda b, i: b.call("aten::mm", i["r"], b.call("aten::t", i["r"])),
    "norm": lambda b, i: b.call("tensor_cast::rms_norm", i["r"], i["w"], 1e-6),
    "second result of a norm": lambda b, i: b.getitem(
        b.call("tensor_cast::add_rms_norm2", i["r"], i["r"], i["w"], 1e-6), 1
    ),
    "anchor": lambda b, i: b.call("tensor_cast::_internal_mark_region_begin", i["r"], 7),
    "view": lambda b, i: b.call("aten::view", i["r"], [2, 2, 8]),
    "cast": lambda b, i: b.call("aten::_to_copy", i["r"], dtype=torch.float64),
    "cat": lambda b, i: b.call("aten::cat", [i["r"], i["r"]], 0),
}


@pytest.mark.parametrize("case", REPLICATING)
def test_equal_operands_give_equal_results(case: str) -> None:
    result, found = facts(REPLICATING[case])
    assert found.replicated(result, (1, 0))


UNKNOWN: dict[str, Any] = {
    "quantised linear": lambda b, i: fp8_linear(b, i["v"], i["r"]),
    "varying operand": lambda b, i: b.call("aten::add.Tensor", i["r"], i["v"]),
    "slice": lambda b, i: b.call("aten::slice.Tensor", i["r"], 0, 0, 2),
    "select": lambda b, i: b.call("aten::select.int", i["r"], 0, 1),
    "part of a split": lambda b, i: b.getitem(b.call("aten::split.Tensor", i["r"], 2), 0),
    "integer operand": lambda b, i: b.call("aten::mul.Scalar", i["r"], 2),
    "integer alpha": lambda b, i: b.call("aten::add.Tensor", i["r"], i["r"], alpha=2),
    "made from an integer": lambda b, i: b.call("aten::full", [4], 3.0),
    "sent": lambda b, i: b.call("tensor_cast::pipeline_send_recv", i["r"], 0, 1, 0, 1),
    "local product": lambda b, i: b.call("aten::mm", i["r"], b.call("aten::t", i["v"])),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_may_differ_is_varying(case: str) -> None:
    result, found = facts(UNKNOWN[case])
    assert found.placement(result, (0, 1)) == VARYING


def test_a_reduce_scatter_gives_a_shard_that_row_wise_ops_keep() -> None:
    def body(b: GraphBuilder, i: dict[str, fx.Node]) -> fx.Node:
        local = b.call("tensor_cast::reduce_scatter", i["x"], -2, b.rank, b.group("tp"))
        norms = b.call("tensor_cast::add_rms_norm2", local, i["s"], i["w"], 1e-6)
        return b.call("aten::add.Tensor", b.getitem(norms, 1), i["s"])

    result, found = facts(body)
    assert found.placement(result, (0, 1)) == shard(0)
    assert found.placement(result, (1, 0)) == VARYING


def test_a_norm_over_the_sharded_dim_keeps_no_shard() -> None:
    def body(b: GraphBuilder, i: dict[str, fx.Node]) -> fx.Node:
        local = b.call("tensor_cast::reduce_scatter", i["x"], 1, b.rank, b.group("tp"))
        return b.call("tensor_cast::rms_norm", local, b.call("aten::slice.Tensor", i["w"], 0, 0, 4), 1e-6)

    result, found = facts(body)
    assert found.placement(result, (0, 1)) == VARYING


def test_a_sum_over_one_group_says_nothing_of_another() -> None:
    result, found = facts(lambda b, i: all_reduce(b, i["r"], "dp"), GRID)
    assert found.replicated(result, (0, 2))
    assert not found.replicated(result, (0, 1))


def test_equal_on_a_group_is_equal_on_a_part_of_it() -> None:
    whole = Mesh.grid({"tp": 4})
    result, found = facts(lambda b, i: i["r"], whole)
    assert found.replicated(result, (2, 1))
    assert not found.replicated(result, (2, 7))


def test_facts_meet_over_parts_of_different_groups() -> None:
    """A sum over all ranks and an input that is replicated over two of them are both equal on these two."""
    graph = build(lambda b, i: b.call("aten::add.Tensor", all_reduce(b, i["x"]), i["r"])).graph(0)
    reduced = node(graph, "all_reduce")
    reduced.update_arg(2, [0, 1, 2, 3])
    assert propagate(graph).replicated(node(graph, "add"), (0, 1))


def test_nothing_is_known_of_what_the_graph_writes_into() -> None:
    def body(b: GraphBuilder, i: dict[str, fx.Node]) -> Any:
        view = b.call("aten::view", i["r"], [32])
        return b.call("aten::neg", i["r"]), b.call("aten::add_.Tensor", view, b.call("aten::view", i["v"], [32]))

    graph = build(body).graph(0)
    assert {n.name for n in mutated_nodes(graph)} == {"r", "view", "add_"}
    assert not propagate(graph).replicated(node(graph, "neg"), (0, 1))


def test_a_call_of_unknown_effect_counts_as_a_write() -> None:
    graph = build(lambda b, i: b.call("aten::relu", i["r"])).graph(0)
    relu = node(graph, "relu")
    with graph.inserting_before(relu):
        graph.call_method("add_", (node(graph, "r"), 1))
    assert node(graph, "r") in mutated_nodes(graph)
    assert not propagate(graph).replicated(relu, (0, 1))
