"""Passes whose module imports the library, in the worker process that has imported tcverify long before."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tcverify import Verdict, verify
from tcverify.errors import PassLoadError
from tcverify.execution import ProcessGroupPool
from tests.cli.conftest import run_here
from tests.coexistence.scenarios import program
from tests.coexistence.standin import STYLES

Pool = Callable[[int], ProcessGroupPool]

LIBRARY = "from tests.coexistence import standin\nstandin.register({style!r})\n"

#: The op is taken when the module is imported, as TensorCast's own passes do.
PASSES = """
import torch
from tests.coexistence.scenarios import drops_reduction, splits_reduction

ALL_REDUCE = torch.ops.tensor_cast.all_reduce.default


def finds_ops(gm):
    if any(node.target is ALL_REDUCE for node in gm.graph.nodes):
        splits_reduction(gm)
"""


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., Verdict]:
    """Verifies a pass of a module given by its text, over `program()`."""

    def run(text: str, name: str, confirm: ProcessGroupPool | None = None, **options: bool) -> Verdict:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return verify(f"{path}:{name}", program(), confirm=confirm, **options)

    return run


def reasons(verdict: Verdict) -> str:
    assert not verdict.findings
    return "\n".join(str(doubt) for doubt in verdict.doubts)


@pytest.mark.parametrize("style", STYLES)
def test_a_sound_pass_passes_and_fires(judge: Callable[..., Verdict], pool: Pool, style: str) -> None:
    verdict = judge(LIBRARY.format(style=style) + PASSES, "finds_ops", pool(2), deep=style == "custom_op")
    assert (verdict.status, verdict.changed, verdict.findings) == ("passed", True, [])
    assert verdict.executors == ["lockstep", "gloo"]


@pytest.mark.parametrize("style", STYLES)
def test_a_defect_is_refuted(judge: Callable[..., Verdict], pool: Pool, style: str) -> None:
    text = LIBRARY.format(style=style) + PASSES
    verdict = judge(text, "drops_reduction", pool(2), always_confirm=True)
    assert [f.kind for f in verdict.findings] == ["wrong-value"]
    assert verdict.executors == ["lockstep", "gloo"]


def test_ops_can_be_named_without_any_library(judge: Callable[..., Verdict]) -> None:
    assert judge(PASSES, "finds_ops").status == "passed"


def test_an_op_that_nobody_has_defined_is_still_an_error(judge: Callable[..., Verdict]) -> None:
    with pytest.raises(PassLoadError, match="'tensor_cast' object has no attribute 'no_such_op'"):
        judge("import torch\nOP = torch.ops.tensor_cast.no_such_op\ndef p(gm): ...\n", "p")


# ------------------------------------------------------------------------------------------- imported while the pass runs

LATE = """
from tests.coexistence import standin
from tests.coexistence.scenarios import splits_reduction

ready = []


def late(gm):
    if not ready:
        standin.register({style!r})
        ready.append(True)
    splits_reduction(gm)
"""


def test_a_library_that_a_pass_imports_when_it_runs_replaces_our_ops(judge: Callable[..., Verdict]) -> None:
    verdict = judge(LATE.format(style="custom_op"), "late")
    assert (verdict.status, verdict.findings) == ("passed", [])


@pytest.mark.parametrize("style", ["def", "fragment"])
def test_a_library_that_cannot_is_no_fault_of_the_pass(judge: Callable[..., Verdict], style: str) -> None:
    verdict = judge(LATE.format(style=style), "late")
    assert verdict.status == "inconclusive"
    assert re.search(
        r"tensor_cast::\w+ is defined by a library .* at the top of the module of the pass", reasons(verdict)
    )


# ------------------------------------------------------------------------------------------------- ops that differ from ours

OTHER = """
import torch
from tests.coexistence import standin


def all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return torch.full_like(x, 7)


standin.register(ops=[all_reduce])


def nothing(gm):
    return gm
"""

LONGER = """
import torch
from tests.coexistence import standin
from tests.coexistence.scenarios import splits_reduction


def all_reduce(
    x: torch.Tensor, rank: int, rank_group: list[int], reduce_op: str = "sum", scale: float = 1.0
) -> torch.Tensor:
    return torch.full_like(x, 7)


standin.register(ops=[all_reduce])


def passes(gm, more):
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.tensor_cast.all_reduce.default:
            node.args = (*node.args, *more)
    gm.recompile()


def says_the_default(gm):
    passes(gm, ("sum",))


def says_another(gm):
    passes(gm, ("max",))
"""


def test_another_signature_is_inconclusive_and_shows_both(judge: Callable[..., Verdict]) -> None:
    verdict = judge(OTHER, "nothing")
    assert verdict.status == "inconclusive"
    said = reasons(verdict)
    assert "op tensor_cast::all_reduce is not supported" in said
    assert "tensor_cast::all_reduce(Tensor x, str group_name) -> Tensor" in said
    assert "tensor_cast::all_reduce(Tensor x, int rank, int[] rank_group) -> Tensor" in said
    assert "use a version of that library" in said


def test_a_longer_signature_is_taken_by_its_defaults(judge: Callable[..., Verdict]) -> None:
    assert judge(LONGER, "splits_reduction").status == "passed"


@pytest.mark.parametrize("name", ["says_the_default", "says_another"])
def test_an_argument_that_we_do_not_know_is_never_passed_over(judge: Callable[..., Verdict], name: str) -> None:
    verdict = judge(LONGER, name)
    assert (verdict.status, verdict.changed) == ("inconclusive", True)
    assert "tensor_cast::all_reduce" in reasons(verdict)


NEW_OPS = """
import torch
from tests.coexistence import standin

standin.register()


def wrap(gm, function):
    (out,) = [n for n in gm.graph.nodes if n.op == "output"]
    with gm.graph.inserting_before(out):
        new = function(gm.graph, out.args[0])
    new.meta["val"] = out.args[0].meta["val"]
    out.args = (new,)
    gm.recompile()


def unknown_op(gm):
    wrap(gm, lambda graph, x: graph.call_function(torch.ops.tensor_cast.something_new.default, (x,)))


def norm(x):
    return torch.ops.tensor_cast.{op}


def in_a_function(gm):
    wrap(gm, lambda graph, x: graph.call_function(norm, (x,)))


class Norm(torch.nn.Module):
    def forward(self, x):
        return norm(x)


def in_a_module(gm):
    gm.add_submodule("norm", Norm())
    wrap(gm, lambda graph, x: graph.call_module("norm", (x,)))
"""

NESTED = ("in_a_function", "in_a_module")


def test_an_op_that_only_the_library_knows_is_named(judge: Callable[..., Verdict]) -> None:
    verdict = judge(NEW_OPS.replace("{op}", "silu(x)"), "unknown_op")
    assert verdict.status == "inconclusive"
    assert "tensor_cast::something_new" in reasons(verdict)


@pytest.mark.parametrize("name", NESTED)
def test_a_kernel_that_computes_shapes_only_is_not_taken_at_its_word(judge: Callable[..., Verdict], name: str) -> None:
    """The op is no identity, but its kernel in the library returns 7 throughout, before the pass and after."""
    doubled = judge(NEW_OPS.replace("{op}", "gated_residual_add(x, x, torch.ones_like(x))"), name)
    assert [f.kind for f in doubled.findings] == ["wrong-value"]
    same = judge(NEW_OPS.replace("{op}", "gated_residual_add(x, x, torch.zeros_like(x))"), name)
    assert (same.status, [d.kind for d in same.doubts], same.findings) == ("passed", [], [])


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("op", ["something_new(x)", "all_reduce(x, 0, [0, 1])"])
def test_what_has_no_meaning_inside_a_call_is_inconclusive(judge: Callable[..., Verdict], name: str, op: str) -> None:
    verdict = judge(NEW_OPS.replace("{op}", op), name)
    assert verdict.status == "inconclusive"
    assert f"tensor_cast::{op.split('(')[0]}" in reasons(verdict)


# ------------------------------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(("name", "code", "said"), [("finds_ops", 0, "passed"), ("drops_reduction", 1, "wrong-value")])
def test_the_command_line_runs_a_pass_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(LIBRARY.format(style="custom_op") + PASSES)
    outcome = run_here(
        "run", f"mine.py:{name}", "--world-size", "2", "--max-examples", "12", "--seed", "3", "--shrink-time", "2",
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (code, "")
    assert said in outcome.out


def test_the_command_line_names_the_op_whose_signature_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OTHER)
    outcome = run_here(
        "run", "mine.py:nothing", "--world-size", "2", "--seed", "3", "--max-examples", "12", "--confirm", "none"
    )
    assert (outcome.code, outcome.err) == (1, "")
    assert "tensor_cast::all_reduce(Tensor x, str group_name)" in " ".join(outcome.out.split())
