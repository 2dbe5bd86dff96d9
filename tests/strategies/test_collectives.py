"""What holds of forward passes with collectives that are drawn for autograd, and of their gradients."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, settings

from tcverify.errors import Unsupported
from tcverify.execution import Lockstep
from tcverify.program import Mesh, Program, dumps, loads
from tcverify.strategies import all_meshes, gradients_programs
from tcverify.strategies.training.collectives import (
    WIDTH,
    Collectives,
    Forward,
    Subgroup,
    decode_forward,
    decode_gradients,
    gradients_program,
    loss_of,
    subgroups_of,
)

Tensor = torch.Tensor


def drawn(count: int, seed: int) -> Iterator[tuple[Mesh, bytes]]:
    generator = random.Random(seed)
    for _ in range(count):
        yield generator.choice(all_meshes(generator.choice((2, 3, 4)))), generator.randbytes(WIDTH)


class Together(Collectives):
    """Collectives of ranks that run in threads of one process, so that autograd goes through those of all ranks.

    Args:
        members: the ranks of each group of this rank, by mesh dim.
        shared: what the ranks show each other, and where they meet.
    """

    def __init__(self, members: dict[str, Sequence[int]], rank: int, shared: tuple[dict[int, Any], threading.Barrier]):
        self._members, self._rank, (self._shown, self._barrier) = members, rank, shared

    def _all(self, value: Any, group: Subgroup) -> list[Any]:
        self._shown[self._rank] = value
        self._barrier.wait(60)
        found = [self._shown[one] for one in self._members[group.name]]
        self._barrier.wait(60)
        return found

    def all_reduce(self, values: Sequence[Tensor], group: Subgroup, op: str) -> list[Tensor]:
        by = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}[op]
        return [by(torch.stack(self._all(value, group)), 0) for value in values]

    def all_gather(self, values: Sequence[Tensor], group: Subgroup, dim: int) -> list[Tensor]:
        return [torch.cat(self._all(value, group), dim) for value in values]

    def reduce_scatter(self, values: Sequence[Tensor], group: Subgroup, op: str, dim: int) -> list[Tensor]:
        return [whole.chunk(group.size, dim)[group.rank] for whole in self.all_reduce(values, group, op)]

    def all_to_all(self, value: Tensor, group: Subgroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return torch.cat([parts[group.rank] for parts in self._all(value.split(list(sent)), group)])

    def broadcast(self, value: Tensor, group: Subgroup, source: int) -> Tensor:
        found: Tensor = self._all(value, group)[source]
        return found


def expected(program: Program) -> list[list[Tensor]]:
    """What each rank returns, by autograd through all ranks at once."""
    forward, world = Forward.of(program.options), range(program.world_size)
    shared: tuple[dict[int, Any], threading.Barrier] = {}, threading.Barrier(len(world))
    own = [
        [value.double().requires_grad_(number in forward.wanted) for number, value in enumerate(program.values(rank))]
        for rank in world
    ]

    def outputs(rank: int) -> list[Tensor]:
        members = {dim.name: dim.group(rank) for dim in program.mesh.dims}
        return forward.outputs(own[rank], subgroups_of(members, rank), Together(members, rank, shared))

    with ThreadPoolExecutor(len(world)) as threads:
        found = list(threads.map(outputs, world))
    loss = sum(map(loss_of, found), torch.zeros(()))
    if loss.requires_grad:
        loss.backward()
    grads = [
        [torch.zeros_like(each[k]) if each[k].grad is None else each[k].grad for k in forward.wanted] for each in own
    ]
    return [[*(one.detach() for one in found[rank]), *grads[rank]] for rank in world]


@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_the_losses_of_all_ranks(seed: int) -> None:
    for mesh, choices in drawn(8, seed):
        program = decode_gradients(mesh, choices)
        run = Lockstep().run(program)
        assert run.finished, (run.why, program.options)
        assert dumps(loads(dumps(program))) == dumps(program)
        for result, wanted in zip(run.ranks, expected(program), strict=True):
            torch.testing.assert_close(list(result.outputs), wanted, msg=str(program.options))


@pytest.mark.parametrize("op", ["max", "min"])
def test_equal_operands_of_extremes_share_the_gradient(op: str) -> None:
    forward = Forward(((2, 2),), (0,), ("all_reduce tp sum 0", f"all_reduce tp {op} 1"))
    program = replace(gradients_program(Mesh.grid({"tp": 3}), forward), options=forward.options())
    for result, wanted in zip(Lockstep().run(program).ranks, expected(program), strict=True):
        torch.testing.assert_close(list(result.outputs), wanted)


def test_any_bytes_decode_and_zeros_give_the_smallest() -> None:
    mesh = Mesh.grid({"tp": 2})
    assert Forward.of(decode_gradients(mesh, b"").options).calls[0] == "all_reduce tp sum 0"
    for filled in (b"\xff" * WIDTH, b"\x11" * 9):
        assert dumps(decode_gradients(mesh, filled)) == dumps(decode_gradients(mesh, filled))


def test_all_calls_are_drawn() -> None:
    forwards = [decode_forward(mesh, choices) for mesh, choices in drawn(400, seed=3)]
    assert all(Forward.of(forward.options()) == forward for forward in forwards)
    words = Counter(word for forward in forwards for call in forward.calls for word in call.split())
    ops = {
        "add", "mul", "matmul", "square", "relu", "tanh", "transpose", "first", "total", "detach",
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
    }  # fmt: skip
    assert ops | {"sum", "avg", "max", "min", "equal", "rising", "last", "tp", "dp"} <= set(words)
    assert any(len(forward.wanted) < len(forward.shapes) for forward in forwards)
    assert any(call.startswith("all_reduce") and len(call.split()) == 5 for one in forwards for call in one.calls)


@pytest.mark.parametrize(
    "changes",
    [
        {"wanted": ()},
        {"wanted": (1,)},
        {"shapes": ((2, 2, 2),)},
        {"shapes": 3},
        {"shapes": ((2, 2.5),)},
        {"calls": ()},
        {"calls": ("",)},
        {"calls": (3,)},
    ],
)
def test_options_that_describe_no_forward_are_refused(changes: dict[str, Any]) -> None:
    sound = {"shapes": ((2, 2),), "wanted": (0,), "calls": ("square 0",)}
    assert Forward.of(sound) == Forward.of({"shapes": [[2, 2]], "wanted": [0], "calls": ["square 0"]})
    with pytest.raises(Unsupported):
        Forward.of({**sound, **changes})


@pytest.mark.parametrize(
    "call",
    [
        "cube 0",
        "square 1",
        "square -1",
        "square",
        "all_reduce dp sum 0",
        "all_reduce tp product 0",
        "all_gather tp 2 0",
        "add 0",
    ],
)
def test_what_is_no_call_is_refused(call: str) -> None:
    with pytest.raises(Unsupported, match="is no call"):
        gradients_program(Mesh.grid({"tp": 2}), Forward(((2, 2),), (0,), (call,)))


def test_meshes_are_those_that_are_asked_for() -> None:
    first = settings(max_examples=10, phases=[Phase.generate], database=None)
    wanted = Mesh.grid({"a": 2, "b": 2})
    assert find(gradients_programs(mesh=wanted), lambda program: True, settings=first).mesh == wanted
    assert find(gradients_programs(world_size=3), lambda program: True, settings=first).world_size == 3
