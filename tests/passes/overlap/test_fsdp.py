"""The three passes on FSDP graphs: what they rewrite, what they leave alone, and that programs show where a guard is missing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.ops import RESIZE, lookup, resolve
from tcverify.passes import Pass
from tcverify.passes.overlap import (
    EnforceCommOrderingForFsdp,
    ReinplaceFsdpAllGather,
    RemoveFsdp2UnshardedParamGraphInputUsage,
    comm_graph,
    fsdp_order,
    fsdp_params,
    fsdp_reinplace,
    is_valid_order,
)
from tcverify.program import GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.strategies import DECODERS, WORLD_SIZES, all_meshes
from tcverify.strategies.fsdp.choices import decode_fsdp_choices, encode_fsdp_choices
from tcverify.strategies.fsdp.programs import decode_fsdp, program_of
from tcverify.verification.verifier import verify
from tests.sizes import by_night

DP2 = Mesh.grid({"dp": 2})
PASSES = [EnforceCommOrderingForFsdp, ReinplaceFsdpAllGather, RemoveFsdp2UnshardedParamGraphInputUsage]


def program(*layers: dict[str, Any], mesh: Mesh = DP2, **setting: Any) -> Program:
    return decode_fsdp(mesh, encode_fsdp_choices({"backward": False, **setting}, list(layers)))


def rewritten(made: Program, pass_: Pass) -> fx.Graph:
    return pass_(made.graph_module(0)).graph


def named(graph: fx.Graph, op: str) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and lookup(n.target).name == op]


def passes(made: Program, kind: type[Pass]) -> bool:
    verdict = verify(InProcess(prepare_pass(kind, "", {})), made)
    assert not verdict.findings, verdict.findings
    return verdict.status == "passed"


# ----------------------------------------------------------------------------------------------------------- reinplacing

GATHER, GATHER_OUT = "_c10d_functional::all_gather_into_tensor", "_c10d_functional::all_gather_into_tensor_out"


@pytest.mark.parametrize("dtypes", ["f32", "mixed"])
def test_an_all_gather_writes_into_the_buffer_of_its_copy_in(dtypes: str) -> None:
    made = program({}, {"kind": "mlp"}, dtypes=dtypes, backward=True)
    pass_ = ReinplaceFsdpAllGather()
    graph = rewritten(made, pass_)
    assert pass_.rewrites == {"all_gather": 4}
    assert not named(graph, GATHER)
    for start in named(graph, GATHER_OUT):
        slice_node, out = start.args[0], start.kwargs["out"]
        assert isinstance(slice_node, fx.Node)
        assert isinstance(out, fx.Node)
        assert slice_node.args[0] is out.args[0]
        assert (slice_node.args[1], out.args[1]) == (0, 1)
        storages = {node.meta["val"].untyped_storage()._cdata for node in (slice_node, out, start, *start.users)}
        assert len(storages) == 1
    assert passes(made, ReinplaceFsdpAllGather)


def test_the_buffer_may_be_named_already() -> None:
    made = program({"twist": "none"})
    gm = made.graph_module(0)
    (copy_in,) = named(gm.graph, "fsdp::all_gather_copy_in")
    (start,) = named(gm.graph, GATHER)
    with gm.graph.inserting_after(start):
        whole = gm.graph.call_function(start.args[0].target, (copy_in, 1))  # type: ignore[union-attr]
    whole.meta["val"] = copy_in.meta["val"][1]
    graph = ReinplaceFsdpAllGather()(gm).graph
    graph.lint()
    assert start.kwargs["out"] is whole


@pytest.mark.parametrize("twist", ["buffer-read", "buffer-returned"])
def test_a_buffer_that_others_use_is_left_alone(twist: str) -> None:
    made = program({"twist": twist}, {"twist": twist})
    pass_ = ReinplaceFsdpAllGather()
    before = str(made.graph(0))
    assert str(rewritten(made, pass_)) == before
    assert pass_.rewrites == {"all_gather": 0}


def test_of_all_gathers_with_one_buffer_the_last_is_reinplaced() -> None:
    made = program({"twist": "buffer-reused"}, {"twist": "buffer-reused"}, {}, copy_out="whole", target="value")
    pass_ = ReinplaceFsdpAllGather()
    graph = rewritten(made, pass_)
    assert pass_.rewrites == {"all_gather": 1}
    assert named(graph, GATHER_OUT)[0].name == named(made.graph(0), GATHER)[-1].name
    assert passes(made, ReinplaceFsdpAllGather)


def _first(graph: fx.Graph, op: str) -> fx.Node:
    return named(graph, op)[0]


def _of_an_input(graph: fx.Graph) -> None:
    """The buffer is an input: the caller would see what has been gathered."""
    buffer = _first(graph, "aten::empty.memory_format")
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        given = graph.placeholder("given")
    given.meta["val"] = buffer.meta["val"]
    buffer.replace_all_uses_with(given)


def _of_another_shape(graph: fx.Graph) -> None:
    """The buffer is longer than what is gathered."""
    buffer = _first(graph, "aten::empty.memory_format")
    buffer.args = ([100],)
    buffer.meta["val"] = buffer.meta["val"].new_empty([100])


def _of_the_whole(graph: fx.Graph) -> None:
    """What is gathered is not the slice."""
    start, copy_in = _first(graph, GATHER), _first(graph, "fsdp::all_gather_copy_in")
    start.args[0].args = (copy_in, 1)  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [_of_an_input, _of_another_shape, _of_the_whole])
def test_what_is_no_reinplaceable_all_gather_is_left_alone(change: Callable[[fx.Graph], None]) -> None:
    gm = program({}).graph_module(0)
    change(gm.graph)
    before = str(gm.graph)
    pass_ = ReinplaceFsdpAllGather()
    assert str(pass_(gm).graph) == before
    assert pass_.rewrites == {"all_gather": 0}


# ------------------------------------------------------------------------------------------------------------ parameters


def resizes(graph: fx.Graph) -> list[tuple[str, Any]]:
    return [(n.args[0].name, n.args[1]) for n in named(graph, RESIZE)]  # type: ignore[union-attr]


@pytest.mark.parametrize("prologue", [True, False])
@pytest.mark.parametrize("copy_out", ["split-copy", "views"])
def test_what_is_copied_into_a_parameter_is_used_in_its_place(prologue: bool, copy_out: str) -> None:
    made = program({"kind": "bias"}, {}, prologue=prologue, copy_out=copy_out, backward=True)
    pass_ = RemoveFsdp2UnshardedParamGraphInputUsage()
    graph = rewritten(made, pass_)
    assert pass_.rewrites == {"parameter": 3}
    assert not named(graph, "fsdp::copy_")
    assert sorted(resizes(graph)) == [("bias0", 0), ("w0", 0), ("w1", 0)]  # freed in the end, as before
    for mm in named(graph, "aten::mm"):
        assert not any(operand.op == "placeholder" and operand.name != "x" for operand in mm.all_input_nodes)
    assert passes(made, RemoveFsdp2UnshardedParamGraphInputUsage)


def test_each_use_gets_what_the_last_copy_has_copied() -> None:
    made = program({}, {"reuse": True}, {"reuse": True, "twist": "by-view"})
    pass_ = RemoveFsdp2UnshardedParamGraphInputUsage()
    graph = rewritten(made, pass_)
    assert pass_.rewrites == {"parameter": 1}
    operands = [mm.args[1] for mm in named(graph, "aten::mm")]
    assert len(set(operands)) == 3
    views = [node for node in graph.nodes if "val" in node.meta and isinstance(node.meta["val"], torch.Tensor)]
    assert all(len({n.meta["val"].untyped_storage()._cdata for n in (view, view.args[0])}) == 1
               for view in views if lookup(view.target).name == "aten::view" and view.op == "call_function")  # fmt: skip
    assert passes(made, RemoveFsdp2UnshardedParamGraphInputUsage)


def test_a_parameter_that_is_empty_at_the_beginning_needs_no_freeing() -> None:
    gm = program({}, prologue=False).graph_module(0)
    w = next(n for n in gm.graph.nodes if n.name == "w0")
    w.meta["val"].untyped_storage().resize_(0)
    RemoveFsdp2UnshardedParamGraphInputUsage()(gm)
    assert resizes(gm.graph) == []


@pytest.mark.parametrize(
    ("twist", "setting"),
    [
        ("kept", {}),
        ("returned", {}),
        ("written", {}),
        ("early-use", {}),
        ("overwritten", {}),
        ("stale-view", {"backward": True}),
        ("none", {"copy_out": "direct"}),
        ("none", {"target": "value"}),
    ],
)
def test_a_parameter_that_others_see_is_left_alone(twist: str, setting: dict[str, Any]) -> None:
    made = program({"twist": twist}, **setting)
    pass_ = RemoveFsdp2UnshardedParamGraphInputUsage()
    before = str(made.graph(0))
    assert str(rewritten(made, pass_)) == before
    assert pass_.rewrites == {"parameter": 0}


def test_parameters_are_judged_one_by_one() -> None:
    pass_ = RemoveFsdp2UnshardedParamGraphInputUsage()
    graph = rewritten(program({"twist": "written"}, {}, {"twist": "kept"}), pass_)
    assert pass_.rewrites == {"parameter": 1}
    assert {node.args[0].name for node in named(graph, "fsdp::copy_")} == {"w0", "w2"}  # type: ignore[union-attr]


def _other_dtype(graph: fx.Graph) -> None:
    w = next(n for n in graph.nodes if n.name == "w0")
    w.meta["val"] = w.meta["val"].to(torch.float64)


def _transposed(graph: fx.Graph) -> None:
    w = next(n for n in graph.nodes if n.name == "w0")
    w.meta["val"] = w.meta["val"].t()


def _a_view_is_written(graph: fx.Graph) -> None:
    (copy,) = named(graph, "fsdp::copy_")
    with graph.inserting_before(copy.next):
        view = graph.call_function(resolve("aten::view"), (copy.args[0], [-1]))
        view.meta["val"] = copy.args[0].meta["val"].view(-1)  # type: ignore[union-attr]
        graph.call_function(resolve("aten::zero_"), (view,)).meta["val"] = view.meta["val"]


def _a_part_is_copied(graph: fx.Graph) -> None:
    (copy,) = named(graph, "fsdp::copy_")
    with graph.inserting_before(copy):
        made = []
        for operand in copy.args:
            part = graph.call_function(resolve("aten::slice.Tensor"), (operand, 0, 0, 1))
            part.meta["val"] = operand.meta["val"][:1]  # type: ignore[union-attr]
            made.append(part)
    copy.args = tuple(made)


def _freed_under_a_use(graph: fx.Graph) -> None:
    (copy,) = named(graph, "fsdp::copy_")
    (mm,) = named(graph, "aten::mm")
    free = named(graph, RESIZE)[-1]
    mm.prepend(free)
    assert copy.args[0] is mm.args[1]


def _tied(graph: fx.Graph) -> None:
    """Another input shares the parameter's storage."""
    w = next(n for n in graph.nodes if n.name == "w0")
    with graph.inserting_before(w):
        other = graph.placeholder("other")
    other.meta["val"] = w.meta["val"].view(-1)


def _a_result_is_read(op: str) -> Callable[[fx.Graph], None]:
    """Of a call that would go with the parameter."""

    def change(graph: fx.Graph) -> None:
        output = graph.output_node()
        output.args = ((*output.all_input_nodes, named(graph, op)[-1]),)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _a_result_is_read("fsdp::copy_"),
        _a_result_is_read(RESIZE),
        _other_dtype,
        _transposed,
        _a_view_is_written,
        _a_part_is_copied,
        _freed_under_a_use,
        _tied,
    ],
)
def test_what_is_not_told_for_sure_is_left_alone(change: Callable[[fx.Graph], None]) -> None:
    gm = program({}).graph_module(0)
    change(gm.graph)
    before = str(gm.graph)
    pass_ = RemoveFsdp2UnshardedParamGraphInputUsage()
    assert str(pass_(gm).graph) == before
    assert pass_.rewrites == {"parameter": 0}


def test_a_parameter_that_is_copied_into_another_one_goes_first() -> None:
    def build(graph: GraphBuilder) -> Any:
        x, w, v = (graph.input(name) for name in "xwv")
        graph.call("fsdp::copy_", w, x)
        graph.call("fsdp::copy_", v, w)
        result = graph.call("aten::relu", v)
        for parameter in (w, v):
            graph.call(RESIZE, parameter, 0)
        return result

    specs = [InputSpec(name, (2,), torch.float32) for name in ("x", "w", "v")]
    original = spmd_program(DP2, specs, build)
    pass_ = RemoveFsdp2UnshardedParamGraphInputUsage()
    gm = pass_(original.graph_module(0))
    assert pass_.rewrites == {"parameter": 2}
    assert not named(gm.graph, "fsdp::copy_")
    assert passes(original, RemoveFsdp2UnshardedParamGraphInputUsage)


def test_what_was_to_follow_an_erased_node_follows_what_that_one_followed() -> None:
    gm = program({}).graph_module(0)
    (copy,) = named(gm.graph, "fsdp::copy_")
    (mm,) = named(gm.graph, "aten::mm")
    wait = _first(gm.graph, "_c10d_functional::wait_tensor")
    copy.meta["after"], mm.meta["after"] = [wait.name], [copy.name]
    RemoveFsdp2UnshardedParamGraphInputUsage()(gm)
    assert mm.meta["after"] == [wait.name]


# ----------------------------------------------------------------------------------------------------------------- order


def places(graph: fx.Graph) -> dict[str, int]:
    return {node.name: place for place, node in enumerate(graph.nodes)}


def test_the_next_all_gather_begins_when_the_last_one_is_over() -> None:
    made = program({}, {}, {}, prefetch="none", dtypes="mixed")
    gm = made.graph_module(0)
    first, second, third = named(gm.graph, "fsdp::all_gather_copy_in")
    for node in named(gm.graph, "aten::_to_copy"):  # casts as early as possible
        _first(gm.graph, RESIZE).append(node)
    pass_ = EnforceCommOrderingForFsdp()
    before = comm_graph(gm.graph, gm.meta["groups"])
    graph = pass_(gm).graph
    assert is_valid_order(before, list(graph.nodes))
    assert pass_.rewrites["all_gather"] > 0
    assert pass_.rewrites["moved"] > 0
    place = places(graph)
    copies = [place[node.name] for node in named(graph, "fsdp::split_with_sizes_copy")]
    casts = [place[node.name] for node in named(graph, "aten::_to_copy")]
    assert copies[0] < casts[1] < place[second.name] < copies[1] < casts[2] < place[third.name]
    assert first.meta.get("after") is None
    for node, copy in ((second, 0), (third, 1)):
        assert named(graph, "fsdp::split_with_sizes_copy")[copy].name in node.meta["after"]
    again = EnforceCommOrderingForFsdp()
    again(gm)
    assert not any(again.rewrites.values())
    assert passes(made, EnforceCommOrderingForFsdp)


def test_the_wait_and_the_copy_out_stand_together() -> None:
    gm = program({}, {}).graph_module(0)
    graph = EnforceCommOrderingForFsdp()(gm).graph
    wait, copy = _first(graph, "_c10d_functional::wait_tensor"), _first(graph, "fsdp::split_with_sizes_copy")
    between = list(graph.nodes)[places(graph)[wait.name] : places(graph)[copy.name]]
    assert [lookup(node.target).name for node in between] == ["_c10d_functional::wait_tensor", "aten::view"]


def test_reduce_scatters_keep_their_turn() -> None:
    made = program({}, {}, {}, backward=True)
    gm = made.graph_module(0)
    pass_ = EnforceCommOrderingForFsdp()
    graph = pass_(gm).graph
    assert pass_.rewrites["reduce_scatter"] > 0
    starts = named(graph, "_c10d_functional::reduce_scatter_tensor")
    assert len(starts) == 3
    for earlier, later in itertools.pairwise(starts):
        wait = next(user for user in earlier.users if lookup(user.target).phase == "wait")
        assert wait.name in later.meta["after"]
        assert places(graph)[wait.name] < places(graph)[later.name]
    assert passes(made, EnforceCommOrderingForFsdp)


def test_what_two_layers_share_is_in_neither_block() -> None:
    made = program({}, {"reuse": True, "share": True}, dtypes="mixed")
    gm = made.graph_module(0)
    (cast,) = named(gm.graph, "aten::_to_copy")
    EnforceCommOrderingForFsdp()(gm)
    assert "after" not in cast.meta
    assert passes(made, EnforceCommOrderingForFsdp)


def test_an_all_gather_that_was_started_before_the_last_wait_stays() -> None:
    made = program({}, {}, prefetch="overlapping")
    pass_ = EnforceCommOrderingForFsdp()
    graph = rewritten(made, pass_)
    assert pass_.rewrites["all_gather"] == 0
    assert all("after" not in node.meta for node in graph.nodes)
    assert passes(made, EnforceCommOrderingForFsdp)


def test_graphs_without_these_patterns_are_not_touched() -> None:
    decoder = DECODERS["functional"]
    generator = random.Random(3)
    for _ in range(10):
        gm = decoder.decode(DP2, generator.randbytes(decoder.width)).graph_module(0)
        before = str(gm.graph)
        for kind in PASSES:
            assert str(kind()(gm).graph) == before


def test_long_graphs_are_rewritten_in_near_linear_time() -> None:
    """Without recursion, too: 150 layers are 2,250 nodes."""
    layers = by_night(400, 150)
    gm = _long(layers)
    assert len(gm.graph.nodes) > 12.5 * layers > 1_800
    counts = {}
    for kind in PASSES:
        pass_ = kind()
        pass_(gm)
        counts[pass_.name] = sum(pass_.rewrites.values())
    assert counts["reinplace_fsdp_all_gather"] == layers
    assert counts["enforce_comm_ordering_for_fsdp"] >= layers - 1
    assert counts["remove_fsdp2_unsharded_param_graph_input_usage"] == 1


def _long(layers: int) -> fx.GraphModule:
    """A chain of layers that all use one parameter again."""
    setting, records, _ = decode_fsdp_choices(encode_fsdp_choices({"backward": False}, [{}, {"reuse": True}]))
    return program_of(DP2, setting, (records[0], *[records[1]] * (layers - 1))).graph_module(0)


# ----------------------------------------------------------------------------------------------------- drawn programs


@cache
def drawn(count: int, seed: int) -> tuple[Program, ...]:
    generator = random.Random(seed)
    meshes = [mesh for size in WORLD_SIZES for mesh in all_meshes(size)]
    decoder = DECODERS["fsdp"]
    return tuple(decoder.decode(generator.choice(meshes), generator.randbytes(decoder.width)) for _ in range(count))


@pytest.mark.parametrize("kind", PASSES)
def test_a_pass_is_sound_on_drawn_programs_and_changes_many(kind: type[Pass]) -> None:
    subject = InProcess(prepare_pass(kind, "", {}))
    changed = 0
    for made in drawn(10, seed=11):
        verdict = verify(subject, made)
        assert verdict.status == "passed", (made.labels, verdict.findings, verdict.doubts)
        changed += verdict.changed
    assert changed >= 3


REMOVE, REINPLACE, ENFORCE = (
    RemoveFsdp2UnshardedParamGraphInputUsage,
    ReinplaceFsdpAllGather,
    EnforceCommOrderingForFsdp,
)

#: (pass, where the guard is, its name, what makes the defect of it, a program that shows it).
BROKEN: dict[str, tuple[type[Pass], Any, str, Callable[[Any], Any], Callable[[], Program]]] = {
    "a buffer that is read": (
        REINPLACE, fsdp_reinplace, "_alone", lambda _: lambda *args: True, lambda: program({"twist": "buffer-read"})
    ),
    "a buffer that is returned": (
        REINPLACE, fsdp_reinplace, "_alone", lambda _: lambda *args: True, lambda: program({"twist": "buffer-returned"})
    ),
    "a buffer that is used again": (
        REINPLACE, fsdp_reinplace, "_alone", lambda _: lambda *args: True,
        lambda: program(
            {"twist": "buffer-reused"}, {"twist": "buffer-reused"}, copy_out="whole", target="value", backward=True,
            reshard=False,
        ),
    ),
    "a parameter that is kept": (
        REMOVE, fsdp_params, "_at_the_end", lambda _: lambda *args: "", lambda: program({"twist": "kept"})
    ),
    "a source that is overwritten": (
        REMOVE, fsdp_params, "_at_the_end", lambda _: lambda *args: "", lambda: program({"twist": "overwritten"})
    ),
    "the size at the end": (
        REMOVE, fsdp_params, "_unneeded", lambda _: lambda one: one.resizes, lambda: program({}, prologue=True)
    ),
    "metadata of views": (
        REMOVE, fsdp_params, "annotate_aliases", lambda _: lambda *args: None, lambda: program({"twist": "by-view"})
    ),
    "what depends on what sinks": (
        ENFORCE, fsdp_order._Order, "_can_sink", lambda _: lambda *args: True,
        lambda: program({}, {}, prefetch="overlapping"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_missing_guard_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, owner, attribute, broken, make = BROKEN[name]
    assert passes(make(), kind)
    monkeypatch.setattr(owner, attribute, broken(getattr(owner, attribute)))
    assert verify(InProcess(prepare_pass(kind, "", {})), make()).status == "refuted"
