"""Multistream scheduling on random programs, judged by a plain model that shares nothing with the pass."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tcverify.passes import Multistream
from tcverify.program import Program, StreamSettings
from tests.support.stream_programs import GRID, TP2, US, Builder, findings, judge, program, sound

BLOCK = 40
KINDS = (
    "mm", "mm", "add", "add", "reduce", "reduce", "reduce", "fused", "pair", "view", "turned", "slice", "write",
    "write-scalar", "cat", "marker", "operator", "ones", "gather",
)  # fmt: skip


class RandomCalls:
    """Adds calls to a program. What they read is random, mostly what was made last.

    Args:
        dims: of the mesh, over which collectives may go.
        writes: whether calls may write into what they read.
    """

    def __init__(self, b: Builder, chance: random.Random, dims: list[str], writes: bool) -> None:
        self.b, self.chance, self.dims, self.writes = b, chance, dims, writes
        self.values = [b["x"], b["v"], b["r"]]

    def some(self) -> Any:
        return self.values[-1 - min(int(self.chance.expovariate(0.4)), len(self.values) - 1)]

    def square(self) -> Any:
        value = self.some()
        return value if self.b.graph.shape(value) == (8, 8) else self.b.call("aten::reshape", value, [8, 8])

    def dim(self) -> str:
        return self.chance.choice(self.dims)

    def add(self, kind: str, cost: float) -> None:
        """Add a call of this kind, and what makes its result a square again."""
        made = self.write(kind, cost) if kind.startswith("write") else MAKERS[kind](self, cost)
        if made is not None:
            self.values.append(made)

    def write(self, kind: str, cost: float) -> Any:
        if not self.writes:
            return None
        target = self.square()
        if 0 in target.meta["val"].stride:
            return None  # one cannot write into what has been expanded
        addend = self.square()
        if kind == "write" and addend.meta["val"].alias != target.meta["val"].alias:
            return self.b.call("aten::add_.Tensor", target, addend, cost=cost)
        return self.b.call("aten::mul_.Scalar", target, 0.5, cost=cost)

    def fused(self, cost: float) -> Any:
        given = self.square(), self.b["w"], None, self.b.graph.rank, self.b.graph.group(self.dim())
        return self.b.call("matmul_all_reduce", *given, cost=cost)

    def gather(self, cost: float) -> Any:
        graph = self.b.graph
        whole = self.b.call("all_gather", self.square(), 0, graph.rank, graph.group("tp"), cost=cost)
        return self.b.call("aten::slice.Tensor", whole, 0, 4, 12)

    def pair(self, cost: float) -> Any:
        both = self.b.pair(self.square(), self.square(), cost)
        self.values.append(self.b.item(both, 0))
        return self.b.item(both, self.chance.choice([1, -1]))

    def cat(self, cost: float) -> Any:
        whole = self.b.call("cat", [self.square(), self.square()], 0, cost=cost)
        return self.b.call("aten::slice.Tensor", whole, 0, 4, 12)

    def slice(self, cost: float) -> Any:
        row = self.b.call("aten::slice.Tensor", self.square(), self.chance.randint(0, 1), 0, 1)
        return self.b.call("aten::expand", row, [8, 8])


MAKERS: dict[str, Callable[[RandomCalls, float], Any]] = {
    "mm": lambda c, cost: c.b.mm(c.square(), cost),
    "add": lambda c, cost: c.b.add(c.square(), c.square(), cost),
    "reduce": lambda c, cost: c.b.all_reduce(c.some(), c.dim(), cost),
    "fused": RandomCalls.fused,
    "gather": RandomCalls.gather,
    "pair": RandomCalls.pair,
    "view": lambda c, cost: c.b.call("aten::reshape", c.some(), c.chance.choice([[64], [4, 16], [8, 8]]), cost=cost),
    "turned": lambda c, cost: c.b.call("aten::t", c.square()),
    "slice": RandomCalls.slice,
    "cat": RandomCalls.cat,
    "marker": lambda c, cost: c.b.call("_internal_copy_region", c.some(), 1, cost=cost),
    "operator": lambda c, cost: c.b.call("python::sub", c.square(), c.square(), cost=cost),
    "ones": lambda c, cost: c.b.call("aten::ones", [8, 8], cost=cost),
}


def random_program(seed: int) -> Program:
    """Up to 24 calls: products, sums, collectives, fused ops, tuples, views, copies, writes, lists, markers, operators."""
    chance = random.Random(seed)
    mesh = TP2 if seed % 3 else GRID
    dims = [dim.name for dim in mesh.dims]

    def build(b: Builder) -> Any:
        chance.seed(seed)
        calls = RandomCalls(b, chance, dims, writes=seed % 2 == 0)
        for _ in range(chance.randint(4, 24)):
            cost = chance.choice([0.0, 1.0, 5.0, 5.0, 10.0, chance.uniform(0, 60)])
            calls.add(chance.choice(KINDS), cost)
        return [calls.values[-1], *(chance.choice(calls.values) for _ in range(chance.randint(0, 3)))]

    streams = chance.choice(
        [
            None,
            None,
            StreamSettings((0,), (1, 2), 2 * US),
            StreamSettings((4,), (2,)),
            StreamSettings((0, 1), (1, 3), US),
        ]
    )
    return program(build, mesh=mesh, streams=streams)


@pytest.mark.parametrize("block", range(6))
def test_random_programs_are_lowered_soundly(block: int) -> None:
    lowered = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        original = random_program(seed)
        pass_ = Multistream()
        for rank in (0, original.world_size - 1):
            graph = pass_(original.graph_module(rank)).graph
            if pass_.rewrites["lowered"]:
                lowered += 1
                graph.lint()
                assert sound(original, graph, rank) == [], seed
    assert lowered >= BLOCK // 3


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_the_verifier_agrees(seed: int) -> None:
    assert findings(random_program(seed)) == set()


def test_the_judge_sees_a_token_that_is_missing() -> None:
    """Every token counts: without any one of them, the judge finds something."""
    seen = 0
    for seed in range(1, 40, 2):
        original = random_program(seed)
        for number in range(100):
            graph = Multistream()(original.graph_module(0)).graph
            waits = [n for n in graph.nodes if n.name.endswith("_wait") and n.args[2]]
            if number >= len(waits):
                break
            value, stream, tokens = waits[number].args
            waits[number].args = (value, stream, tokens[1:])  # type: ignore[index]
            assert judge(original, graph).problems, (seed, waits[number].name)
            seen += 1
    assert seen > 20
