"""Random programs of host IR: happens-before finds a race exactly where some order of the streams shows one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import fx

from tcverify.application import Pair
from tcverify.checks import Evidence
from tcverify.checks.streams.happens_before import find_order_violations
from tcverify.execution import explore
from tcverify.program import Contract
from tests.support.host_programs import Build, Host, nothing, program


class Drawing:
    """A program on its way, sound or not: about a dozen steps on three streams."""

    def __init__(self, b: Host, rng: random.Random) -> None:
        self.b, self.rng = b, rng
        self.streams = [b.current(), b.stream(0), b.stream(1)]
        self.values, self.buffers, self.posted = [b.x, b.y], [b.empty(4, 4, 4)], list[fx.Node]()

    def step(self) -> None:
        b, rng = self.b, self.rng
        step = rng.random()
        if step < 0.2:
            b.set(rng.choice(self.streams))
        elif step < 0.45:
            b.sync(rng.choice(self.streams))
        elif step < 0.55:
            self.values.append(b.mm(rng.choice(self.values), rng.choice(self.values)))
        elif step < 0.6:
            self.buffers.append(b.empty(4, 4, 4))
        elif step < 0.75:
            b.put(self.row(), rng.choice(self.values))
        elif step < 0.82:
            self.values.append(b.relu(self.row()))
        elif step < 0.92:
            self.post()
        elif step < 0.96 and self.posted:
            b.wait(rng.choice([*self.posted, *self.buffers]))
        else:
            self.free()

    def row(self) -> fx.Node:
        return self.b.part(self.rng.choice(self.buffers), self.rng.randrange(4), self.rng.randrange(3))

    def post(self) -> None:
        b, rng = self.b, self.rng
        out = b.part(rng.choice(self.buffers), rng.randrange(4)) if rng.random() < 0.6 else b.empty(4, 4)
        team = [0, 1] if rng.random() < 0.7 else [1, 0]
        self.posted.append(b.post("all_reduce", rng.choice(self.values), "sum", team, out=out))
        self.values.append(self.posted[-1])
        if rng.random() < 0.7:
            b.wait(self.posted[-1])

    def free(self) -> None:
        own = [value for value in self.values[2:] if value not in self.posted]
        if own:
            self.b.free(own[-1])
            self.values.remove(own[-1])

    def finish(self) -> Any:
        self.b.set(self.streams[0])
        if self.rng.random() < 0.6:
            for stream in self.streams:
                self.b.sync(stream)
            for each in self.posted:
                self.b.wait(each)
        return tuple(self.values[-2:])


def drawn(seed: int) -> Build:
    """A random program, the same on both ranks."""

    def build(b: Host) -> Any:
        rng = random.Random(seed)
        drawing = Drawing(b, rng)
        for _ in range(rng.randint(4, 12)):
            drawing.step()
        return drawing.finish()

    return build


def agree(seeds: range) -> tuple[int, int]:
    """How many programs have a race and how many have none, of those that run in issue order."""
    raced = sound = 0
    for seed in seeds:
        made = program(drawn(seed))
        pair = Pair(program(nothing), made, changed=True)
        found = find_order_violations(Evidence(pair, Contract(inputs="stream0")), everything=True)
        played = explore(made, inputs="stream0", systematic=True)
        if played is None:  # it uses what it has freed
            continue
        assert played.complete
        assert bool(found) == bool(played.observations), (seed, found, played.observations[:1])
        raced, sound = raced + bool(found), sound + (not found)
    return raced, sound


def test_the_check_and_the_executor_agree() -> None:
    raced, sound = agree(range(40))
    assert min(raced, sound) >= 10


@pytest.mark.slow
def test_the_check_and_the_executor_agree_on_many() -> None:
    raced, sound = agree(range(40, 3_000))
    assert min(raced, sound) >= 1_000
