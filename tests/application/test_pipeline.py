"""Pipelines: options, metadata between stages, and which stage a finding names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx

from tcverify import Contract, verify
from tcverify.application import Guarded, InProcess, subject_of
from tcverify.application.loading import load_pass
from tcverify.errors import PassLoadError, UsageError
from tcverify.passes import Identity, SequenceParallel
from tcverify.program import PARTIAL, GraphBuilder, InputSpec, Mesh, Program, Recipe, spmd_program
from tcverify.registry.pipelines import stage_options, stage_targets
from tests.mutants.sequence_parallel import ResidualNotSliced
from tests.support.programs import reduce_then_norm

SCALE = torch.ops.aten.mul.Tensor


def _scaled(gm: fx.GraphModule, factor: float, *, annotate: bool = True) -> fx.GraphModule:
    """Multiply what the all_reduce gives."""
    node = next(n for n in gm.graph.nodes if n.name.startswith("all_reduce"))
    with gm.graph.inserting_after(node):
        made = gm.graph.call_function(SCALE, (node, factor))
    if annotate:
        made.meta["val"] = node.meta["val"].clone()
    node.replace_all_uses_with(made)
    made.args = (node, factor)
    gm.recompile()
    return gm


def doubles(gm: fx.GraphModule) -> fx.GraphModule:
    return _scaled(gm, 2.0)


def halves(gm: fx.GraphModule) -> fx.GraphModule:
    return _scaled(gm, 0.5)


def one(gm: fx.GraphModule) -> fx.GraphModule:
    return _scaled(gm, 1.0)


def raises(gm: fx.GraphModule) -> fx.GraphModule:
    raise ValueError("no good")


def unused_before_definition(gm: fx.GraphModule) -> fx.GraphModule:
    """Leaves a graph in which a node reads a later one."""
    first, *_, last = (n for n in gm.graph.nodes if n.op == "call_function")
    first.update_arg(0, last)
    return gm


class LeavesNoMetadata:
    """Inserts a node whose metadata a later step is to make."""

    contract = Contract(metadata=False)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        return _scaled(gm, 1.0, annotate=False)


class AsksForMetadata:
    """Refuses graphs in which a node has no metadata."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.nodes:
            assert node.op == "output" or "val" in node.meta, node.name
        return _scaled(gm, 1.0)


HERE = "tests.application.test_pipeline"


def test_a_plus_joins_stages_and_one_in_a_path_does_not() -> None:
    assert stage_targets("a:P+b.c:Q+d/e.py:R") == ["a:P", "b.c:Q", "d/e.py:R"]
    assert stage_targets("c++/x.py:P+b:Q") == ["c++/x.py:P", "b:Q"]
    assert stage_targets("a:P") == ["a:P"]
    with pytest.raises(PassLoadError, match="empty stage"):
        stage_targets("a:P++b:Q")


def test_options_name_their_stage() -> None:
    assert stage_options(["first"], {"a.b": 1}) == [{"a.b": 1}]
    assert stage_options(["x", "y"], {"x.a": 1, "2.b": 2}) == [{"a": 1}, {"b": 2}]
    assert stage_options(["x", "x"], {"1.a": 1}) == [{"a": 1}, {}]
    for key in ("a", "z.a", "3.a"):
        with pytest.raises(PassLoadError, match="names no stage"):
            stage_options(["x", "y"], {key: 1})
    with pytest.raises(PassLoadError, match="several stages") as caught:
        stage_options(["x", "x"], {"x.a": 1})
    assert caught.value.hint == "write 2.NAME"
    with pytest.raises(PassLoadError, match="no option"):
        stage_options(["x", "y"], {"y.": 1})


def _without_metadata(gm: fx.GraphModule) -> fx.GraphModule:
    for node in gm.graph.nodes:
        if node.op == "call_function":
            del node.meta["val"]
    return gm


_without_metadata.contract = Contract(metadata=True)  # type: ignore[attr-defined]


def test_a_stage_that_spoils_metadata_alone_is_to_blame() -> None:
    for stages in ([_without_metadata, Identity], [Identity, _without_metadata, SequenceParallel, Identity]):
        verdict = verify(stages, reduce_then_norm())
        assert {f.kind: f.data["stage"] for f in verdict.findings} == {"stale-metadata": "_without_metadata"}


def test_a_sound_pipeline_passes_and_reports_every_stage() -> None:
    verdict = verify([SequenceParallel, Identity], reduce_then_norm(), deep=True)
    assert verdict.status == "passed"
    assert verdict.changed
    assert [stage.name for stage in verdict.pair.stages] == ["sequence_parallel", "identity"]
    assert verdict.pair.rewrites["P1"] == 2


def test_what_one_stage_breaks_the_next_may_mend() -> None:
    assert verify([doubles, halves], reduce_then_norm()).status == "passed"


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize(
    ("stages", "kind", "culprit"),
    [
        (("doubles", "one"), "wrong-value", "doubles"),
        (("one", "doubles"), "wrong-value", "doubles"),
        (("one", "doubles", "one"), "wrong-value", "doubles"),
        (("one", "raises"), "pass-raised", "raises"),
        (("raises", "one"), "pass-raised", "raises"),
        (("one", "unused_before_definition", "raises"), "malformed-graph", "unused_before_definition"),
        (("one", "unused_before_definition"), "malformed-graph", "unused_before_definition"),
    ],
)
def test_a_finding_names_the_stage_that_broke_the_program(
    stages: tuple[str, ...], kind: str, culprit: str, guarded: bool
) -> None:
    target = "+".join(f"{HERE}:{name}" for name in stages)
    subject = Guarded(target) if guarded else InProcess(load_pass(target))
    try:
        verdict = verify(subject, reduce_then_norm())
    finally:
        subject.close()
    found = next(f for f in verdict.findings if f.kind == kind)
    assert found.data["stage"] == culprit
    assert f"(stage {culprit})" in found.title


def test_an_unsound_stage_in_the_middle_is_named() -> None:
    program = _two_norms()
    verdict = verify([Identity, ResidualNotSliced, Identity], program)
    assert verdict.status == "refuted"
    assert {f.data["stage"] for f in verdict.findings} == {"ResidualNotSliced"}


def test_metadata_is_made_anew_behind_a_stage_that_promises_none() -> None:
    assert verify([LeavesNoMetadata, AsksForMetadata], reduce_then_norm()).status == "passed"
    assert verify([one, AsksForMetadata], reduce_then_norm()).status == "passed"


def test_missing_metadata_of_a_stage_that_promises_it_is_a_finding() -> None:
    verdict = verify([_leaves_none, one], reduce_then_norm())
    assert [f.kind for f in verdict.hygiene] == ["stale-metadata"]
    assert verdict.hygiene[0].data["stage"] == "_leaves_none"


def _leaves_none(gm: fx.GraphModule) -> fx.GraphModule:
    return _scaled(gm, 1.0, annotate=False)


_leaves_none.contract = Contract(metadata=True)  # type: ignore[attr-defined]


def test_promises_of_a_pipeline_are_those_of_the_whole() -> None:
    subject = subject_of([Identity, Identity])
    try:
        assert subject.contract.identity
    finally:
        subject.close()
    loaded = load_pass("tcverify.passes:SequenceParallel+tcverify.passes:Identity")
    assert not loaded.contract.identity
    assert not loaded.contract.idempotent
    assert loaded.facts.name == "sequence_parallel+identity"


def test_options_reach_their_stage(tmp_path: Path) -> None:
    target = "tcverify.passes:SequenceParallel+tcverify.passes:Identity"
    loaded = load_pass(target, {"sequence_parallel.patterns": "P2", "2.enabled": "false"})
    assert loaded.facts.options == {"sequence_parallel.patterns": "P2", "2.enabled": "false"}
    first, second = loaded.stages
    assert first.subject.patterns == frozenset({"P2"})
    assert second.subject.enabled is False
    with pytest.raises(PassLoadError, match="names no stage"):
        load_pass(target, {"patterns": "P2"})
    with pytest.raises((PassLoadError, UsageError), match="pattern"):
        load_pass(target, {"1.pattern": "P2"})


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("identity", ["identity"]),
        ("torch:reinplace", ["torch:reinplace"]),
        ("sink_waits+torch:ddp_fusion", ["sink_waits", "torch:ddp_fusion"]),
    ],
)
def test_names_mean_in_python_what_they_mean_on_the_command_line(name: str, names: list[str]) -> None:
    """`torch:compile` is not the attribute `compile` of torch."""
    with subject_of(name) as subject:
        assert subject.facts.name.split("+") == names


def test_a_name_that_pytorch_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no subject 'torch:nothing'"):
        subject_of("torch:nothing")


def test_objects_make_a_pipeline_too() -> None:
    factor = 2.0
    verdict = verify([lambda gm: _scaled(gm, factor), lambda gm: _scaled(gm, 1 / factor)], reduce_then_norm())
    assert verdict.status == "passed"
    with pytest.raises(PassLoadError, match="needs stages"):
        verify([], reduce_then_norm())


def _two_norms() -> Program:
    """all_reduce → add_rms_norm2 with a replicated residual."""
    inputs = [
        InputSpec("x", (4, 8), placements=(("tp", PARTIAL),)),
        InputSpec("r", (4, 8)),
        InputSpec("gain", (8,), recipe=Recipe("norm_weight")),
    ]

    def build(b: GraphBuilder) -> object:
        x, r, gain = (b.input(spec.name) for spec in inputs)
        total = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
        both = b.call("tensor_cast::add_rms_norm2", total, r, gain, 1e-6)
        return b.getitem(both, 0), b.getitem(both, 1)

    return spmd_program(Mesh.grid({"tp": 2}), inputs, build)
