"""Counterexamples whose rewritten program has streams, for the tests of timelines."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import fx

from tcverify.application import PassFacts
from tcverify.cases.counterexample import Counterexample, make_counterexample
from tcverify.ops import lookup
from tcverify.passes import Multistream
from tcverify.program import Contract, Program, StreamSettings
from tcverify.verification.verifier import verify
from tests.support.stream_programs import WAIT, Builder, program

FACTS = PassFacts("mine", "mine.py:Pass", {}, "abc", {})
US = 1e-6


def layers(number: int = 1, cost: Any = None) -> Program:
    """Layers of a reduction beside three products, a fused norm whose results are read on both streams, and a fused
    product with its reduction."""

    def build(b: Builder) -> Any:
        x, v = b["x"], b["v"]
        for _ in range(number):
            reduced = b.all_reduce(x)
            branch = b.mm(b.mm(b.mm(v)))
            pair = b.pair(reduced, branch)
            x = b.all_reduce(b.item(pair, 0))
            v = b.add(b.mm(b.item(pair, 1)), b.mm(branch))
        return b.add(x, v), v

    streams = StreamSettings(compute=(0, 2), comm=(1,), sync_overhead_s=2 * US)
    settings = {} if cost is None else {"cost": cost}
    return program(build, streams=streams, **settings)


def ends_in_a_reduction() -> Program:
    """A reduction beside products; both are returned."""

    def build(b: Builder) -> Any:
        return b.all_reduce(b["x"]), b.mm(b.mm(b["v"]))

    return program(build)


class LosesTokens(Multistream):
    """Schedules, and then takes the tokens out of the first wait for a reduction: a race."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm = super().__call__(gm)
        waits = [n for n in gm.graph.nodes if n.op == "call_function" and lookup(n.target).name == WAIT and n.args[2]]
        for wait in waits:
            if any("all_reduce" in str(token.args[0]) for token in wait.args[2]):  # type: ignore[union-attr]
                wait.args = (*wait.args[:2], [])
                break
        return gm


class Exaggerates(Multistream):
    """Declares half the makespan."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        gm = super().__call__(gm)
        output = next(n for n in gm.graph.nodes if n.op == "output")
        if "schedule" in output.meta:
            output.meta["schedule"] = {
                **output.meta["schedule"],
                "makespan_s": output.meta["schedule"]["makespan_s"] / 2,
            }
        return gm


PASSES = {"race": LosesTokens, "wrong-schedule": Exaggerates}


@cache
def schedule_case(kind: str, number: int = 1) -> Counterexample:
    """Return a counterexample of this kind, whose program has so many layers; of none, one whose outputs race."""
    verdict = verify(PASSES[kind](), layers(number) if number else ends_in_a_reduction())
    return make_counterexample(verdict, kind, FACTS, Contract())
