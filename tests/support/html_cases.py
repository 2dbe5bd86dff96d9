"""Counterexamples of every kind, as `tcverify run` would keep them, for the tests of the page."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import fx

from tcverify.application import PassFacts
from tcverify.cases.counterexample import Counterexample, make_counterexample
from tcverify.ops import resolve
from tcverify.program import PARTIAL, Contract, GraphBuilder, InputSpec, Mesh, MeshDim, Program, Recipe, spmd_program
from tcverify.verification.verifier import verify

FACTS = PassFacts("mine", "mine.py:Pass", {}, "abc", {})


def blocks(number: int, mesh: Mesh | None = None) -> Program:
    """Residual blocks: all_reduce, add, rms_norm, silu; four nodes each."""
    mesh = mesh or Mesh.grid({"tp": 2})
    inputs = [
        InputSpec("x", (4, 8), placements=(("tp", PARTIAL),)),
        InputSpec("residual", (4, 8)),
        InputSpec("gain", (8,), recipe=Recipe("norm_weight")),
    ]

    def build(b: GraphBuilder) -> object:
        x, residual, gain = (b.input(spec.name) for spec in inputs)
        for _ in range(number):
            reduced = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
            residual = b.call("aten::add.Tensor", reduced, residual)
            x = b.call("aten::silu", b.call("tensor_cast::rms_norm", residual, gain, 1e-6))
        return x

    return spmd_program(mesh, inputs, build, seed=3)


def ring() -> Mesh:
    """Sixteen ranks, each in a group with the next one and in another with the one before."""
    even, odd = (tuple((i, (i + 1) % 16) for i in range(start, 16, 2)) for start in (0, 1))
    return Mesh(16, (MeshDim("tp", even), MeshDim("dp", odd)))


def two_groups(mesh: Mesh | None = None) -> Program:
    """One all_reduce per mesh dim, independent of each other."""
    mesh = mesh or Mesh.grid({"dp": 2, "tp": 2})
    inputs = [InputSpec("x", (2, 4)), InputSpec("y", (2, 4))]

    def build(b: GraphBuilder) -> object:
        x, y = b.input("x"), b.input("y")
        over_tp = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
        over_dp = b.call("tensor_cast::all_reduce", y, b.rank, b.group("dp"))
        return b.call("aten::add.Tensor", over_tp, over_dp)

    return spmd_program(mesh, inputs, build, seed=1)


def reductions(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if "all_reduce" in str(n.target)]


def drops_middle_reduction(gm: fx.GraphModule) -> None:
    found = reductions(gm)
    node = found[len(found) // 2]
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    gm.graph.erase_node(node)


def swaps_on_outer_ranks(gm: fx.GraphModule) -> None:
    first, second = reductions(gm)
    if first.args[1] in (0, 3):
        second.append(first)


def swaps_on_odd_ranks(gm: fx.GraphModule) -> None:
    first, second = reductions(gm)
    if first.args[1] in range(1, 16, 2):
        second.append(first)


def widens(gm: fx.GraphModule) -> None:
    """What was reduced is gathered as well: it does not fit the residual any more."""
    node = reductions(gm)[0]
    rank, group = node.args[1:]
    with gm.graph.inserting_after(node):
        target = resolve("tensor_cast::all_gather")
        gathered = gm.graph.call_function(target, (node, 0, rank, group))
    node.replace_all_uses_with(gathered, delete_user_cb=lambda user: user is not gathered)


def refuses(gm: fx.GraphModule) -> None:
    raise ValueError(f"no idea what {reductions(gm)[0].name} is")


@cache
def case(kind: str, number: int = 1) -> Counterexample:
    """Return a counterexample of this kind."""
    passes: dict[str, tuple[Callable[[fx.GraphModule], None], Program]] = {
        "wrong-value": (drops_middle_reduction, blocks(number)),
        "deadlock": (swaps_on_outer_ranks, two_groups()),
        "ring": (swaps_on_odd_ranks, two_groups(ring())),
        "rewritten-raises": (widens, blocks(number)),
        "pass-raised": (refuses, blocks(number)),
    }
    pass_, program = passes[kind]
    verdict = verify(pass_, program)
    return make_counterexample(verdict, "deadlock" if kind == "ring" else kind, FACTS, Contract())
