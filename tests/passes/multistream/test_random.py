"""Multistream scheduling on random programs, judged by a plain model that shares nothing with the pass."""

from __future__ import annotations

import random
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


def random_program(seed: int) -> Program:
    """Up to 24 calls: products, sums, collectives, fused ops, tuples, views, copies, writes, lists, markers, operators."""
    chance = random.Random(seed)
    mesh = TP2 if seed % 3 else GRID
    dims = [dim.name for dim in mesh.dims]
    writes = seed % 2 == 0

    def build(b: Builder) -> Any:
        chance.seed(seed)
        values = [b["x"], b["v"], b["r"]]

        def some() -> Any:
            return values[-1 - min(int(chance.expovariate(0.4)), len(values) - 1)]

        def square(value: Any) -> Any:
            return value if b.graph.shape(value) == (8, 8) else b.call("aten::reshape", value, [8, 8])

        for _ in range(chance.randint(4, 24)):
            cost = chance.choice([0.0, 1.0, 5.0, 5.0, 10.0, chance.uniform(0, 60)])
            kind = chance.choice(KINDS)
            if kind == "mm":
                made = b.mm(square(some()), cost)
            elif kind == "add":
                made = b.add(square(some()), square(some()), cost)
            elif kind == "reduce":
                made = b.all_reduce(some(), chance.choice(dims), cost)
            elif kind == "fused":
                given = square(some()), b["w"], None, b.graph.rank, b.graph.group(chance.choice(dims))
                made = b.call("matmul_all_reduce", *given, cost=cost)
            elif kind == "gather":
                whole = b.call("all_gather", square(some()), 0, b.graph.rank, b.graph.group("tp"), cost=cost)
                made = b.call("aten::slice.Tensor", whole, 0, 4, 12)
            elif kind == "pair":
                both = b.pair(square(some()), square(some()), cost)
                values.append(b.item(both, 0))
                made = b.item(both, chance.choice([1, -1]))
            elif kind == "view":
                made = b.call("aten::reshape", some(), chance.choice([[64], [4, 16], [8, 8]]), cost=cost)
            elif kind == "turned":
                made = b.call("aten::t", square(some()))
            elif kind == "slice":
                made = b.call(
                    "aten::expand", b.call("aten::slice.Tensor", square(some()), chance.randint(0, 1), 0, 1), [8, 8]
                )
            elif kind.startswith("write") and writes:
                target = square(some())
                if 0 in target.meta["val"].stride:
                    continue  # one cannot write into what has been expanded
                addend = square(some())
                if kind == "write" and addend.meta["val"].alias != target.meta["val"].alias:
                    made = b.call("aten::add_.Tensor", target, addend, cost=cost)
                else:
                    made = b.call("aten::mul_.Scalar", target, 0.5, cost=cost)
            elif kind == "cat":
                whole = b.call("cat", [square(some()), square(some())], 0, cost=cost)
                made = b.call("aten::slice.Tensor", whole, 0, 4, 12)
            elif kind == "marker":
                made = b.call("_internal_copy_region", some(), 1, cost=cost)
            elif kind == "operator":
                made = b.call("python::sub", square(some()), square(some()), cost=cost)
            elif kind == "ones":
                made = b.call("aten::ones", [8, 8], cost=cost)
            else:
                continue
            values.append(made)
        return [values[-1], *(chance.choice(values) for _ in range(chance.randint(0, 3)))]

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
