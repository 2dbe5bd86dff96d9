"""The passes from layouts to host programs: run one after the other, each switched off, dumped, and named."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import fx

from tcverify import verify
from tcverify.errors import Unsupported, UsageError
from tcverify.execution import ProcessGroupPool, explore
from tcverify.passes import BUILTIN, DESCRIPTIONS, RESHARDING_PASSES, SUITED, disable_passes
from tcverify.passes.editing import op_name
from tcverify.passes.resharding.host_program import STAGES, HostProgram
from tcverify.program import PlacedBuilder, Program
from tcverify.strategies import STRATEGIES

MESH = "[2, 0, 1]"
Pools = Callable[[int], ProcessGroupPool]


@cache
def everything(chunks: int = 3) -> Program:
    """A pipelined matmul, a gather of an inner dim, a loop with a reduction to other ranks: something for every stage."""
    b = PlacedBuilder(3)
    a = b.input("a", (chunks, 3, 2, 5), f"{MESH} shard(1)")
    w = b.input("w", (5, 6), f"{MESH} replicated")
    p = b.input("p", (3, 4, 6), f"{MESH} shard(0)")
    q = b.input("q", (4, 6), f"{MESH} shard(1)")
    product = b.call("aten::matmul", b.set(a, f"{MESH} replicated"), w, stream_axis=0)
    double = b.call("aten::add.Tensor", p, p, stream_axis=2)
    total = b.reduce(double, 0, "[1, 0] replicated", stream_axis=1)
    double = b.set(double, f"{MESH} replicated") if chunks == 1 else b.set(b.call("aten::neg", q), f"{MESH} replicated")
    return b.build(b.call("aten::relu", product), b.call("aten::exp", total), double)


@cache
def one_chunk() -> Program:
    """Such that each stage can do without those before it: what is gathered is the outermost dim."""
    return everything(1)


def ops(gm: fx.GraphModule) -> set[str]:
    return {op_name(node) for node in gm.graph.nodes if node.op == "call_function"}


@cache
def lowered(program: Callable[[], Program], **options: Any) -> Program:
    modules = program().graph_modules()
    for gm in modules:
        HostProgram(**options)(gm)
    return program().with_graphs([gm.graph for gm in modules])


# -------------------------------------------------------------------------------------------------- what comes out of it


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_a_program_with_something_for_every_stage_is_lowered(streams: int) -> None:
    program = everything()
    verdict = verify(HostProgram(number_of_streams=streams), program, deep=streams == 2)
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]
    found = explore(lowered(everything, number_of_streams=streams), inputs="stream0")
    assert found is not None
    assert not found.observations


@pytest.mark.parametrize(("form", "reduce_form"), [("broadcast", "reduce"), ("p2p", "p2p"), ("ring", "ring")])
def test_the_form_of_pipelines_is_passed_on(form: str, reduce_form: str) -> None:
    verdict = verify(HostProgram(form=form, reduce_form=reduce_form), everything())
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]
    assert ops(lowered(everything, form=form).graph_module(0)) != ops(lowered(everything).graph_module(0))


def test_gloo_computes_what_lockstep_computes(pool: Pools) -> None:
    verdict = verify(HostProgram(number_of_streams=2), everything(), confirm=pool(3))
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]
    assert "gloo" in verdict.executors


def test_every_stage_counts_what_it_rewrote() -> None:
    pass_ = HostProgram()
    pass_(everything().graph_module(0))
    assert list(pass_.rewrites) == list(STAGES)
    assert all(pass_.rewrites.values())


def test_it_does_what_its_stages_do_one_after_the_other() -> None:
    gm = everything().graph_module(1)
    for name in STAGES:
        BUILTIN[name]()(gm)
    assert gm.code == lowered(everything).graph_module(1).code


def test_afterwards_no_resharding_and_no_stream_axis_is_left() -> None:
    for gm in lowered(everything).graph_modules():
        assert not any("stream_axis" in node.meta or "multidevice" in op_name(node) for node in gm.graph.nodes)


def test_a_stage_that_declines_says_which_node_it_is_about() -> None:
    b = PlacedBuilder(2)
    x = b.input("x", (4, 6), "[0, 1] replicated")
    program = b.build(b.call("aten::softmax.int", x, 0, stream_axis=0))
    with pytest.raises(Unsupported, match="'softmax' cannot be computed along a stream axis"):
        HostProgram()(program.graph_module(0))
    verdict = verify(HostProgram(), program)
    assert (verdict.status, [doubt.reason for doubt in verdict.doubts]) == ("inconclusive", ["declined"])


# ------------------------------------------------------------------------------------------------ stages, on and off


def test_frees_can_be_left_out() -> None:
    pass_ = HostProgram(deallocate="false")
    assert [stage.name for stage in pass_.stages] == list(STAGES[:-1])
    assert not pass_.contract.deallocation
    gm = pass_(everything().graph_module(0))
    assert "host_ir::deallocate" not in ops(gm)
    assert verify(pass_, everything()).status == "passed"


@pytest.mark.parametrize("left_out", STAGES)
def test_every_stage_can_be_left_out(left_out: str) -> None:
    pass_ = HostProgram(stages=",".join(name for name in STAGES if name != left_out))
    pass_(one_chunk().graph_module(0))
    assert pass_.rewrites[left_out] == 0
    verdict = verify(pass_, one_chunk())
    assert verdict.status == "passed", [finding.title for finding in verdict.findings]


@pytest.mark.parametrize("off", STAGES)
def test_the_guard_over_names_reaches_stages(off: str) -> None:
    pass_ = HostProgram()
    with disable_passes(off):
        pass_(one_chunk().graph_module(0))
        assert pass_.rewrites[off] == 0
        assert any(pass_.rewrites.values())
    pass_(everything().graph_module(0))
    assert pass_.rewrites[off] > 0


def test_without_dims_brought_to_the_front_inner_resharding_is_declined() -> None:
    with disable_passes("make_resharding_contiguous"), pytest.raises(Unsupported, match="inner resharding"):
        HostProgram()(everything().graph_module(0))


def test_the_promises_are_those_of_the_stages() -> None:
    whole = HostProgram(number_of_streams="2").contract
    assert (whole.lowered, whole.deallocation, whole.streams, whole.inputs) == (True, True, 2, "stream0")
    part = HostProgram(stages="stream_parallel_type,insert_deallocations").contract
    assert (part.lowered, part.deallocation) == (False, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"number_of_streams": 0}, "number_of_streams of pass 'resharding' cannot be 0"),
        ({"stages": "lowering"}, "there is no 'lowering'"),
        ({"form": "star"}, "form of pass 'pipelined_matmul' cannot be 'star'"),
        ({"deallocate": "perhaps"}, "deallocate of pass 'resharding' cannot be 'perhaps'"),
        ({"streams": 2}, "has no option 'streams'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        HostProgram(**options)


# ---------------------------------------------------------------------- enable flag, guard, dump, name: of every pass


@pytest.mark.parametrize("name", RESHARDING_PASSES)
def test_a_disabled_pass_is_the_identity(name: str, tmp_path: Path) -> None:
    gm = one_chunk().graph_module(0)
    before, code = [(node, node.args, dict(node.meta)) for node in gm.graph.nodes], gm.code
    off = BUILTIN[name](enabled="false", dump=tmp_path)
    on = BUILTIN[name](dump=tmp_path)
    with on.disabled():
        assert on(gm) is gm
    with disable_passes(name):
        assert on(gm) is gm
    assert off(gm) is gm
    assert [(node, node.args, dict(node.meta)) for node in gm.graph.nodes] == before
    assert gm.code == code
    assert not any((*off.rewrites.values(), *on.rewrites.values()))
    assert not list(tmp_path.iterdir())
    assert on.enabled


@pytest.mark.parametrize("name", RESHARDING_PASSES)
def test_the_guard_restores_the_flag_and_the_pass_works_again(name: str) -> None:
    pass_ = BUILTIN[name]()
    with pytest.raises(KeyError), pass_.disabled():
        raise KeyError
    with pytest.raises(KeyError), disable_passes(name):
        raise KeyError
    pass_((everything if name == "make_resharding_contiguous" else one_chunk)().graph_module(0))
    assert any(pass_.rewrites.values())


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_dumps_the_program_after_it(name: str, tmp_path: Path) -> None:
    gm = one_chunk().graph_module(0)
    BUILTIN[name](dump=tmp_path)(gm)
    text = (tmp_path / f"{name}-0000.txt").read_text()
    assert text.startswith(f"# after {name} (")
    assert gm.print_readable(print_output=False) in text


def test_the_program_is_dumped_after_each_stage(tmp_path: Path) -> None:
    gm = everything().graph_module(0)
    HostProgram(dump=tmp_path)(gm)
    dumps = {path.name.rpartition("-")[0]: path.read_text() for path in tmp_path.iterdir()}
    assert dumps.keys() == {*STAGES, "resharding"}
    first, second, _, third, last = (dumps[name] for name in STAGES)
    assert "host_ir.all_gather" in first
    assert "multidevice.reduce" in first
    assert "multidevice.reduce" in second
    assert "multidevice" not in third
    assert "deallocate" not in third
    assert "host_ir.deallocate" in last
    assert last.partition("\n")[2] == dumps["resharding"].partition("\n")[2]


@pytest.mark.parametrize("name", RESHARDING_PASSES)
def test_every_pass_has_a_name_a_line_and_a_strategy(name: str) -> None:
    assert BUILTIN[name]().name == name
    assert DESCRIPTIONS[name]
    assert SUITED[name] in STRATEGIES
