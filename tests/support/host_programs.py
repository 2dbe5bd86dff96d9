"""Writes programs of host IR by hand, and asks checks what they find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tcverify.application import Pair
from tcverify.checks import CHECKS, Evidence
from tcverify.program import Contract, InputSpec, Mesh, Program
from tcverify.program.finding import Doubt, Finding
from tests.support.hand_written import SQUARES, Writing, written
from tests.support.programs import TP2

TEAM = [0, 1]


class Host(Writing):
    """A builder of host IR. `me` is the rank whose graph it is."""

    @property
    def me(self) -> int:
        return self.representative

    def empty(self, *shape: int) -> fx.Node:
        return self.call("aten::empty.memory_format", list(shape), dtype=torch.float32)

    def post(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self.call(f"host_ir::{op}", *args, **kwargs)

    def gather(self, value: fx.Node, out: fx.Node, team: Sequence[int] = (0, 1)) -> fx.Node:
        """An all_gather along dim 0."""
        return self.post("all_gather", value, 0, list(team), out=out)

    def wait(self, posted: fx.Node) -> fx.Node:
        return self.post("wait", posted)

    def current(self) -> fx.Node:
        return self.post("current_stream")

    def stream(self, index: Any) -> fx.Node:
        return self.post("stream", index)

    def set(self, stream: fx.Node) -> fx.Node:
        return self.post("set_current_stream", stream)

    def sync(self, stream: fx.Node) -> fx.Node:
        return self.post("synchronize", stream)

    def free(self, value: fx.Node) -> fx.Node:
        return self.post("deallocate", value)

    def put(self, into: fx.Node, value: fx.Node) -> fx.Node:
        return self.call("aten::copy_", into, value)

    def part(self, value: fx.Node, index: int, dim: int = 0) -> fx.Node:
        return self.call("aten::select.int", value, dim, index)


Build = Callable[[Host], Any]


def program(build: Build, mesh: Mesh = TP2, given: Sequence[InputSpec] = SQUARES) -> Program:
    """A program with a graph per rank."""
    return written(Host, [build] * mesh.world_size, mesh, given)


def nothing(b: Host) -> Any:
    """What stands before lowerings whose original does not matter."""
    return b.relu(b.x)


def judge(
    check: str,
    build: Build,
    *,
    before: Build = nothing,
    mesh: Mesh = TP2,
    given: Sequence[InputSpec] = SQUARES,
    **promises: Any,
) -> list[Finding | Doubt]:
    """What a check says of a program that promises what lowerings of resharding do of their inputs."""
    contract = Contract(**{"inputs": "stream0", **promises})
    pair = Pair(program(before, mesh, given), program(build, mesh, given), changed=True)
    return CHECKS[check](Evidence(pair, contract))


#: The checks that look at one program, without running it.
STATIC = ("structure", "metadata", "happens-before", "host-program", "order", "memory")


def findings(build: Build, *checks: str, **options: Any) -> list[Finding]:
    """What some checks find, or all that need no run; there are no doubts."""
    found = [said for check in checks or STATIC for said in judge(check, build, **options)]
    assert not [said for said in found if isinstance(said, Doubt)], found
    return [said for said in found if isinstance(said, Finding)]


def kinds(build: Build, *checks: str, **options: Any) -> list[str]:
    return [finding.kind for finding in findings(build, *checks, **options)]


def found(build: Build, *checks: str, **options: Any) -> Finding:
    """The only finding."""
    (only,) = findings(build, *checks, **options)
    return only


# ------------------------------------------------------------------------------------------------------- sound programs

#: Chunks of the pipelined programs, and the inputs: x [S, D, 2, 4] divided over dim 1, y [4, 4].
CHUNKS = 4
CHUNKED = (InputSpec("x", (CHUNKS, 1, 2, 4)), InputSpec("y", (4, 4)))


def pipelined(
    b: Host,
    streams: int = 2,
    *,
    begin: bool = True,
    join: bool = True,
    wait: bool = True,
    restore: bool = True,
    dim: int = 0,
    free: bool = False,
) -> Any:
    """all_gather and matmul in chunks, chunk j on worker j mod `streams`.

    Args:
        begin, join, wait, restore: whether workers wait for the caller's stream, and it for them; whether what is gathered is
            waited for; whether the caller's stream is current again in between.
        dim: where the chunks lie in the output.
        free: whether everything is freed that is not returned.
    """
    caller = b.current()
    gathered = b.empty(CHUNKS, 2, 2, 4)
    shape = [2, 2, 4]
    out = b.empty(*shape[:dim], CHUNKS, *shape[dim:])
    for j in range(CHUNKS if begin else 0):
        b.set(b.stream(j % streams))
        b.sync(caller)
    for j in range(CHUNKS):
        worker = b.stream(j % streams)
        b.set(worker)
        posted = b.gather(b.part(b.x, j), b.part(gathered, j))
        if wait:
            b.wait(posted)
        product = b.call("aten::matmul", posted, b.y)
        b.put(b.part(out, j, dim), product)
        if free:
            b.free(product)
        if restore:
            b.set(caller)
            if join:
                b.sync(worker)
    if free:
        b.free(gathered)
    return out
