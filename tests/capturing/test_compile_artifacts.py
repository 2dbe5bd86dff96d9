"""The graphs that torch.compile leaves behind are read as they are, and verified at their real sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.torch_version import TorchVersion

from tcverify import verify
from tcverify.capturing import LoadedProgram, UserFacts, load
from tcverify.capturing.compile_artifacts import ArtifactText, read_artifact, texts_in
from tcverify.capturing.groups import groups_from_sizes, mesh_of_sizes, rank_at
from tcverify.capturing.record import GroupSize
from tcverify.errors import ProgramError, UsageError
from tcverify.ops import qualified_name
from tcverify.passes.identity import Identity
from tcverify.program import Mesh
from tests.support.artifacts import traced

GROUPS_ARE_TOLD = TorchVersion(torch.__version__) >= (2, 10)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced(tmp_path_factory.mktemp("traced"))


def loaded(source: str, mesh: Mesh | None = None) -> LoadedProgram:
    return load([source], UserFacts(mesh=mesh if GROUPS_ARE_TOLD else Mesh.grid({"tp": 4})))


@pytest.fixture(scope="module")
def forward(log: Path) -> LoadedProgram:
    return loaded(f"{log}:0")


def ops(graph: fx.Graph) -> list[str]:
    return [qualified_name(node.target) for node in graph.nodes if node.op == "call_function"]


def test_a_trace_log_holds_the_graphs_of_both_passes(log: Path, forward: LoadedProgram) -> None:
    assert len(texts_in(log)) == 2
    assert forward.program.world_size == 4
    assert "_c10d_functional::all_reduce" in ops(forward.program.graphs[0])
    backward = loaded(f"{log}:1", Mesh.grid({"tp": 4})).program  # it names no group
    assert "aten::mm" in ops(backward.graphs[0])
    with pytest.raises(UsageError, match="holds 2 graphs of one rank"):
        loaded(str(log))
    with pytest.raises(UsageError, match="there are 2 graphs"):
        loaded(f"{log}:7")


def test_it_is_verified_on_small_sizes(forward: LoadedProgram) -> None:
    assert forward.program.large
    verdict = verify(Identity(), forward.program)
    assert verdict.status == "passed"
    assert verdict.pair.scaled.real is forward.program
    assert max(max(spec.shape, default=0) for spec in verdict.pair.original.inputs) < 512


def doubled(module: fx.GraphModule) -> None:
    """Adds the result of the last collective to itself."""
    last = [n for n in module.graph.nodes if n.target is torch.ops._c10d_functional.wait_tensor.default][-1]
    with module.graph.inserting_after(last):
        made = module.graph.call_function(torch.ops.aten.add.Tensor, (last, last))
    made.meta["val"] = last.meta["val"]
    last.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def test_a_defect_is_found_at_real_sizes(forward: LoadedProgram) -> None:
    seen: list[Any] = []

    def wrong(module: fx.GraphModule) -> None:
        seen.append(max(n.meta["val"].numel() for n in module.graph.nodes if n.op == "placeholder"))
        doubled(module)

    verdict = verify(wrong, forward.program)
    assert verdict.status == "refuted"
    assert "wrong-value" in {finding.kind for finding in verdict.findings}
    assert min(seen) >= 32768 * 64


def test_folders_hold_a_graph_for_every_rank(tmp_path: Path, log: Path) -> None:
    (text, _) = texts_in(log)
    for rank in range(4):
        place = tmp_path / f"rank_{rank}" / "fx_graph_runnable_3.txt"
        place.parent.mkdir()
        place.write_text(text.text.replace("'rank': 0", f"'rank': {rank}"))
    program = load([str(tmp_path)], UserFacts(mesh=Mesh.grid({"tp": 4}))).program
    assert program.world_size == 4
    assert verify(Identity(), program).status == "passed"


def test_folders_of_debug_runs_name_their_graphs(tmp_path: Path, log: Path) -> None:
    """TORCH_COMPILE_DEBUG writes each graph several times, and the log of TORCH_TRACE beside them."""
    (text, _) = texts_in(log)
    for name in ("model__0_backward_1", "model__0_forward_0"):
        place = tmp_path / "run_3" / "torchinductor" / name
        place.mkdir(parents=True)
        for kind in ("fx_graph_runnable.py", "fx_graph_readable.py"):
            (place / kind).write_text(text.text)
    assert len(texts_in(tmp_path)) == 2
    with pytest.raises(UsageError) as refused:
        load([str(tmp_path)], UserFacts(mesh=Mesh.grid({"tp": 4})))
    assert f"{tmp_path}:1 is {tmp_path}/run_3/torchinductor/model__0_forward_0" in str(refused.value.hint)
    (tmp_path / "trace_rank_0.log").write_text(log.read_text())
    assert [one.rank for one in texts_in(tmp_path)] == [0, 0]


PRINTED = """
class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "f32[8, 6][6, 1]cuda:0", arg1_1: "i64[]cuda:0"):
        # File: model.py:3 in forward, code: return x * 2
        mul: "f32[8, 6]" = torch.ops.aten.mul.Tensor(arg0_1, 2);  arg0_1 = None
        full: "f32[8]" = torch.ops.aten.full.default([8], -inf, device = device(type='cuda', index=0))
        split = torch.ops.aten.split.Tensor(mul, 4)
        getitem = split[0];  split = None
        return (getitem, full)
"""


def read(text: str) -> Any:
    return read_artifact(ArtifactText(Path("graph.txt"), 0, text))


def test_a_printed_graph_is_read_for_another_device() -> None:
    captured = read(PRINTED)
    assert ops(captured.graph) == ["aten::mul.Tensor", "aten::full", "aten::split.Tensor", "python::getitem"]
    assert [one.spec.shape for one in captured.inputs] == [(8, 6), ()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: text.index("getitem = ")], "returns nothing"),
        (lambda text: text[: text.index("[8, 6][6") + 3], "not Python"),
        (
            lambda text: text.replace("aten.full", "my_library.full"),
            "line 6: this torch .* has no 'torch.ops.my_library.full",
        ),
        (
            lambda text: text.replace(': "f32[8, 6][6, 1]cuda:0"', ""),
            "line 3: the shape of input 'arg0_1' is unknown",
        ),
        (lambda text: text.replace("(mul, 4)", "(gone, 4)"), "line 7: 'gone' is not defined"),
        (lambda text: text.replace("split[0]", "self.sub(mul)"), "self.sub"),
        (lambda text: text.replace('"f32[8, 6][6', '"f32[s0, 6][6'), "symbolic sizes"),
    ],
)
def test_what_is_no_graph_is_refused_with_its_line(change: Any, message: str) -> None:
    with pytest.raises(ProgramError) as refused:
        read(change(PRINTED))
    assert re.search(message, refused.value.message), refused.value.message


def test_nothing_of_a_file_is_executed(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    text = f"import pathlib\npathlib.Path({str(flag)!r}).touch()\n" + PRINTED.replace("<lambda>", "Graph")
    read(text)
    assert not flag.exists()


def test_a_mesh_of_sizes_alone() -> None:
    two = {"9": GroupSize(4, 0), "1": GroupSize(2, 0)}
    assert mesh_of_sizes(two, None) == Mesh.grid({"pg1": 2, "pg9": 4})
    assert mesh_of_sizes(two, 24) == Mesh.grid({"others": 3, "pg1": 2, "pg9": 4})
    whole = mesh_of_sizes({**two, "0": GroupSize(8, 0)}, None)
    assert [len(dim.groups[0]) for dim in whole.dims] == [2, 4, 8]
    with pytest.raises(ProgramError, match="do not hold groups"):
        mesh_of_sizes(two, 12)


def test_positions_tell_the_rank_and_sizes_the_dims() -> None:
    sizes, mesh = {"9": GroupSize(4, 3), "1": GroupSize(2, 1)}, Mesh.grid({"dp": 2, "tp": 4})
    assert rank_at(sizes, mesh) == 7
    assert rank_at({}, mesh) is None
    assert {name: facts.ranks for name, facts in groups_from_sizes(sizes, mesh, 7).items()} == {
        "9": (4, 5, 6, 7),
        "1": (3, 7),
    }
    with pytest.raises(ProgramError, match="group '9' has 4 ranks, and no dim of the mesh dp=2,tp=3"):
        groups_from_sizes(sizes, Mesh.grid({"dp": 2, "tp": 3}), 0)
