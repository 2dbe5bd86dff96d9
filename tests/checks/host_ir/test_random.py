"""Random programs of host IR: happens-before finds a race exactly where some order of the streams shows one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch import fx

from tcverify.application import Pair
from tcverify.checks import Evidence
from tcverify.checks.streams.happens_before import found_of_order
from tcverify.execution import explore
from tcverify.program import Contract
from tests.support.host_programs import Build, Host, nothing, program


def drawn(seed: int) -> Build:
    """A program of a dozen steps on three streams, sound or not; the same on both ranks."""

    def build(b: Host) -> Any:
        rng = random.Random(seed)
        streams = [b.current(), b.stream(0), b.stream(1)]
        values, buffers, posted = [b.x, b.y], [b.empty(4, 4, 4)], list[fx.Node]()
        for _ in range(rng.randint(4, 12)):
            step = rng.random()
            if step < 0.2:
                b.set(rng.choice(streams))
            elif step < 0.45:
                b.sync(rng.choice(streams))
            elif step < 0.55:
                values.append(b.mm(rng.choice(values), rng.choice(values)))
            elif step < 0.6:
                buffers.append(b.empty(4, 4, 4))
            elif step < 0.75:
                b.put(b.part(rng.choice(buffers), rng.randrange(4), rng.randrange(3)), rng.choice(values))
            elif step < 0.82:
                values.append(b.relu(b.part(rng.choice(buffers), rng.randrange(4), rng.randrange(3))))
            elif step < 0.92:
                out = b.part(rng.choice(buffers), rng.randrange(4)) if rng.random() < 0.6 else b.empty(4, 4)
                team = [0, 1] if rng.random() < 0.7 else [1, 0]
                posted.append(b.post("all_reduce", rng.choice(values), "sum", team, out=out))
                values.append(posted[-1])
                if rng.random() < 0.7:
                    b.wait(posted[-1])
            elif step < 0.96 and posted:
                b.wait(rng.choice([*posted, *buffers]))
            else:
                own = [value for value in values[2:] if value not in posted]
                if own:
                    b.free(own[-1])
                    values.remove(own[-1])
        b.set(streams[0])
        if rng.random() < 0.6:
            for stream in streams:
                b.sync(stream)
            for each in posted:
                b.wait(each)
        return tuple(values[-2:])

    return build


def agree(seeds: range) -> tuple[int, int]:
    """How many programs have a race and how many have none, of those that run in issue order."""
    raced = sound = 0
    for seed in seeds:
        made = program(drawn(seed))
        pair = Pair(program(nothing), made, changed=True)
        found = found_of_order(Evidence(pair, Contract(inputs="stream0")), everything=True)
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
