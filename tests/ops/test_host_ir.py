"""What the communications of host IR compute, against plain torch, in lockstep and on gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import fx

from tcverify.domains import NATIVE
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.execution.asynchrony import TIMINGS
from tcverify.ops import ShapeError
from tcverify.program import Program
from tests.support.host_communications import SHAPE, Host, check, host_program, inputs
from tests.support.naive_layouts import reduce_over

LOCKSTEP = Lockstep()
Parts = dict[int, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One communication.

    Attributes:
        post: writes it on a member of the team; returns it.
        expected: what members return, from what they have and the team. Others return nothing.
    """

    post: Callable[[Host, list[int]], fx.Node]
    expected: Callable[[Parts, list[int]], Parts]


def rows(tensor: torch.Tensor, parts: int, dim: int = 0) -> Sequence[torch.Tensor]:
    return [t.contiguous() for t in tensor.chunk(parts, dim)]


def scaled(dim: int, factor: float) -> list[int]:
    return [round(size * factor) if at == dim else size for at, size in enumerate(SHAPE)]


def all_gather(dim: int) -> Case:
    return Case(
        lambda b, team: b.post("all_gather", b.x, dim, team, out=b.empty(*scaled(dim, len(team)))),
        lambda x, team: dict.fromkeys(team, torch.cat([x[r] for r in team], dim)),
    )


def all_reduce(op: str) -> Case:
    return Case(
        lambda b, team: b.post("all_reduce", b.x, op, team, out=b.empty(*SHAPE)),
        lambda x, team: dict.fromkeys(team, reduce_over(torch.stack([x[r] for r in team]), 0, op)),
    )


def reduce_scatter(dim: int, op: str = "sum") -> Case:
    def expected(x: Parts, team: list[int]) -> Parts:
        total = reduce_over(torch.stack([x[r] for r in team]), 0, op)
        return dict(zip(team, rows(total, len(team), dim), strict=True))

    def post(b: Host, team: list[int]) -> fx.Node:
        return b.post("reduce_scatter", b.x, dim, op, team, out=b.empty(*scaled(dim, 1 / len(team))))

    return Case(post, expected)


def all_to_all() -> Case:
    def expected(x: Parts, team: list[int]) -> Parts:
        cut = {r: rows(x[r], len(team)) for r in team}
        return {r: torch.cat([cut[s][i] for s in team]) for i, r in enumerate(team)}

    return Case(lambda b, team: b.post("all_to_all", b.x, team, out=b.empty(*SHAPE)), expected)


def permute(shift: int) -> Case:
    def targets(team: list[int]) -> list[int]:
        return [(i + shift) % len(team) for i in range(len(team))]

    return Case(
        lambda b, team: b.post("permute", b.x, targets(team), team, out=b.empty(*SHAPE)),
        lambda x, team: {team[to]: x[r] for r, to in zip(team, targets(team), strict=True)},
    )


def swap() -> Case:
    """The first two change places; the others keep what they have."""

    def targets(team: list[int]) -> list[int]:
        return [1, 0, *range(2, len(team))] if len(team) > 1 else [0]

    return Case(
        lambda b, team: b.post("permute", b.x, targets(team), team, out=b.empty(*SHAPE)),
        lambda x, team: {team[to]: x[r] for r, to in zip(team, targets(team), strict=True)},
    )


def broadcast(at: int, *, joined: bool = False) -> Case:
    """From the team's position `at`; a joined root gets nothing."""

    def post(b: Host, team: list[int]) -> fx.Node:
        root = team[at]
        x = b.x if b.me == root else None
        return b.post("broadcast", x, root, team, out=None if joined and b.me == root else b.empty(*SHAPE))

    return Case(post, lambda x, team: {r: x[team[at]] for r in team if not (joined and r == team[at])})


def gather(at: int, dim: int = 0, *, joined: bool = False) -> Case:
    def post(b: Host, team: list[int]) -> fx.Node:
        root = team[at]
        if b.me != root:
            return b.post("gather", b.x, dim, root, team, out=None)
        return b.post("gather", None if joined else b.x, dim, root, team, out=b.empty(*scaled(dim, len(team) - joined)))

    return Case(
        post, lambda x, team: {team[at]: torch.cat([x[r] for r in team if not (joined and r == team[at])], dim)}
    )


def scatter(at: int, dim: int = 0, *, joined: bool = False) -> Case:
    def post(b: Host, team: list[int]) -> fx.Node:
        root = team[at]
        out = None if joined and b.me == root else b.empty(*scaled(dim, 1 / (len(team) - joined)))
        return b.post("scatter", b.x if b.me == root else None, dim, root, team, out=out)

    def expected(x: Parts, team: list[int]) -> Parts:
        getting = [r for r in team if not (joined and r == team[at])]
        return dict(zip(getting, rows(x[team[at]], len(getting), dim), strict=True))

    return Case(post, expected)


def reduce(at: int, op: str = "sum") -> Case:
    return Case(
        lambda b, team: b.post("reduce", b.x, op, team[at], team, out=b.empty(*SHAPE) if b.me == team[at] else None),
        lambda x, team: {team[at]: reduce_over(torch.stack([x[r] for r in team]), 0, op)},
    )


EXACT = {
    "all_gather": all_gather(0),
    "all_gather of columns": all_gather(1),
    "all_to_all": all_to_all(),
    "permute": permute(1),
    "permute to itself": permute(0),
    "swap": swap(),
    "broadcast": broadcast(0),
    "broadcast from the last": broadcast(-1),
    "gather": gather(0),
    "gather of columns to the last": gather(-1, 1),
    "scatter": scatter(0),
    "scatter of columns from the last": scatter(-1, 1),
}
JOINED = {
    "broadcast, root joins": broadcast(0, joined=True),
    "gather, root joins": gather(0, joined=True),
    "gather of columns, last joins": gather(-1, 1, joined=True),
    "scatter, root joins": scatter(0, joined=True),
    "scatter of columns, last joins": scatter(-1, 1, joined=True),
}
REDUCING = {
    "reduce_scatter": reduce_scatter(0),
    "reduce_scatter of columns": reduce_scatter(1),
    "reduce_scatter max": reduce_scatter(0, "max"),
    "reduce": reduce(0),
    "reduce avg to the last": reduce(-1, "avg"),
    **{f"all_reduce {op}": all_reduce(op) for op in ("sum", "avg", "product", "min", "max")},
}
BITS = {f"{make.__name__} {op}": make(op) for op in ("band", "bor", "bxor") for make in (all_reduce,)} | {
    f"{name} {op}": case
    for op in ("band", "bor", "bxor")
    for name, case in (("reduce", reduce(0, op)), ("reduce_scatter", reduce_scatter(1, op)))
}
CASES = EXACT | JOINED | REDUCING

TEAMS = [[0, 1], [1, 0], [2, 0], [3, 1, 0], [2, 3, 0, 1], [0, 1, 2, 3]]


def program(case: Case, team: list[int], world_size: int = 4, dtype: torch.dtype = torch.float32) -> Program:
    def build(b: Host) -> Sequence[fx.Node]:
        return [b.wait(case.post(b, team))] if b.me in team else []

    return host_program(world_size, build, dtype)


# ---------------------------------------------------------------------------------------------------------- in lockstep


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("name", CASES)
def test_communications_at_all_times(name: str, timing: str) -> None:
    for team in TEAMS:
        made = program(CASES[name], team)
        expected = CASES[name].expected(inputs(made), team)
        check(LOCKSTEP.run(made, timing=timing), expected, exact=name not in REDUCING)


@pytest.mark.parametrize("name", [name for name in CASES if name not in JOINED])
def test_a_team_of_one(name: str) -> None:
    made = program(CASES[name], [1], 2)
    check(LOCKSTEP.run(made), CASES[name].expected(inputs(made), [1]), exact=name not in REDUCING)


@pytest.mark.parametrize("name", BITS)
def test_bits(name: str) -> None:
    made = program(BITS[name], [2, 0, 3], dtype=torch.int64)
    check(LOCKSTEP.run(made), BITS[name].expected(inputs(made), [2, 0, 3]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int16, torch.int32, torch.uint8, torch.int64])
@pytest.mark.parametrize("name", EXACT | JOINED)
def test_what_moves_data_moves_any_dtype(name: str, dtype: torch.dtype) -> None:
    made = program(CASES[name], [3, 1, 0], dtype=dtype)
    check(LOCKSTEP.run(made), CASES[name].expected(inputs(made), [3, 1, 0]))


def sends(pairs: Sequence[tuple[int, int]]) -> Callable[[Host], Sequence[fx.Node]]:
    """Every pair's first sends to its second; all is posted before anything is waited for."""

    def build(b: Host) -> Sequence[fx.Node]:
        outs = {pair: b.empty(*SHAPE) for pair in pairs if pair[1] == b.me}
        posted = []
        for source, target in pairs:
            if source == b.me:
                posted.append(b.post("send", b.x, target))
            if target == b.me:
                posted.append(b.post("recv", outs[source, target], source))
        for communication in posted:
            b.wait(communication)
        return list(outs.values())

    return build


@pytest.mark.parametrize("timing", TIMINGS)
@pytest.mark.parametrize("pairs", [[(0, 1)], [(1, 0)], [(0, 1), (1, 0)], [(0, 1), (1, 2), (2, 0)], [(2, 0), (1, 3)]])
def test_sends_and_receives(pairs: list[tuple[int, int]], timing: str) -> None:
    made = host_program(4, sends(pairs))
    x = inputs(made)
    check(LOCKSTEP.run(made, timing=timing), {target: x[source] for source, target in pairs})


def test_a_result_of_a_send_has_no_elements() -> None:
    made = host_program(2, lambda b: [b.wait(b.post("send", b.x, 1) if b.me == 0 else b.post("recv", b.x, 0))])
    run = LOCKSTEP.run(made)
    assert run.ranks[0].outputs[0].shape == (0,)


def test_posted_together_and_waited_for_in_another_order() -> None:
    def build(b: Host) -> Sequence[fx.Node]:
        total = b.post("all_reduce", b.x, "max", [1, 0], out=b.empty(*SHAPE))
        whole = b.post("all_gather", b.x, 0, [1, 0], out=b.empty(24, 12))
        return [b.wait(whole), b.wait(total)] if b.me else [b.wait(total), b.wait(whole)]

    made = host_program(2, build)
    x = inputs(made)
    for timing in TIMINGS:
        run = LOCKSTEP.run(made, timing=timing)
        assert run.finished, run.why
        for result in run.ranks:
            whole, total = result.outputs if result.rank else reversed(result.outputs)
            assert torch.equal(whole, torch.cat([x[1], x[0]]))
            assert torch.equal(total, torch.maximum(x[0], x[1]))


def test_an_output_that_is_read_too_early_shows_where_communication_is_late() -> None:
    def build(b: Host) -> Sequence[fx.Node]:
        posted = b.post("all_reduce", b.x, "sum", [0, 1], out=b.empty(*SHAPE))
        early = b.call("aten::clone", posted)
        b.wait(posted)
        return [early]

    made = host_program(2, build)
    x = inputs(made)
    assert torch.equal(LOCKSTEP.run(made, timing="issue").ranks[0].outputs[0], x[0] + x[1])
    assert not torch.equal(LOCKSTEP.run(made, timing="apart").ranks[0].outputs[0], x[0] + x[1])


def test_what_is_deallocated_holds_nothing_of_use() -> None:
    def build(b: Host) -> Sequence[fx.Node]:
        doubled = b.call("aten::add.Tensor", b.x, b.x)
        b.call("host_ir::deallocate", doubled)
        return [b.call("aten::relu", doubled)]

    run = LOCKSTEP.run(host_program(1, build))
    assert not run.finished
    assert "deallocate" in run.why or "freed" in run.why


def test_streams_change_nothing_in_lockstep() -> None:
    def build(b: Host) -> Sequence[fx.Node]:
        caller = b.call("host_ir::current_stream")
        worker = b.call("host_ir::stream", 1)
        b.call("host_ir::set_current_stream", worker)
        b.call("host_ir::synchronize", caller)
        made = b.wait(b.post("all_gather", b.x, 0, [1, 0], out=b.empty(24, 12)))
        b.call("host_ir::set_current_stream", caller)
        b.call("host_ir::synchronize", worker)
        return [made]

    made = host_program(2, build)
    check(LOCKSTEP.run(made), all_gather(0).expected(inputs(made), [1, 0]))


# --------------------------------------------------------------------------------------------------------------- errors

Refused = Callable[[Host], fx.Node]

REFUSED: dict[str, Refused] = {
    r"rank 0 of team \[1, 2\], which it is not in": lambda b: b.post("all_reduce", b.x, "sum", [1, 2], out=b.empty(*SHAPE)),
    r"team \[0, 0\], which names a rank twice": lambda b: b.post("all_reduce", b.x, "sum", [0, 0], out=b.empty(*SHAPE)),
    r"root 2, which is not in team \[0, 1\]": lambda b: b.post("broadcast", b.x, 2, [0, 1], out=b.empty(*SHAPE)),
    r"gather with root 2, which is not in": lambda b: b.post("gather", b.x, 0, 2, [0, 1], out=None),
    r"scatter with root 2, which is not in": lambda b: b.post("scatter", None, 0, 2, [0, 1], out=b.empty(*SHAPE)),
    r"reduce with root 2, which is not in": lambda b: b.post("reduce", b.x, "sum", 2, [0, 1], out=None),
    r"reduces by 'mean'; known are sum": lambda b: b.post("all_reduce", b.x, "mean", [0, 1], out=b.empty(*SHAPE)),
    r"permute to positions \[0, 0\] of a group of 2": lambda b: b.post("permute", b.x, [0, 0], [0, 1], out=b.empty(*SHAPE)),
    r"permute to positions \[1\] of a group of 2": lambda b: b.post("permute", b.x, [1], [0, 1], out=b.empty(*SHAPE)),
    r"broadcast from rank 0, which has no operand": lambda b: b.post("broadcast", None, 0, [0, 1], out=b.empty(*SHAPE)),
    r"gather to rank 0, which has no output": lambda b: b.post("gather", b.x, 0, 0, [0, 1], out=None),
    r"gather to rank 1: rank 0 must have an operand": lambda b: b.post("gather", b.x, 0, 1, [0, 1], out=b.empty(24, 12)),
    r"scatter from rank 0, which has no operand": lambda b: b.post("scatter", None, 0, 0, [0, 1], out=b.empty(6, 12)),
    r"scatter from rank 1: rank 0 must have an output": lambda b: b.post("scatter", b.x, 0, 1, [0, 1], out=b.empty(6, 12)),
    r"scatter from rank 0 of team \[0\], in which no rank gets": lambda b: b.post("scatter", b.x, 0, 0, [0], out=None),
    r"reduce to rank 0: rank 0 has no output": lambda b: b.post("reduce", b.x, "sum", 0, [0, 1], out=None),
    r"reduce to rank 1: rank 0 has an output": lambda b: b.post("reduce", b.x, "sum", 1, [0, 1], out=b.empty(*SHAPE)),
    r"rank 0 sends to itself": lambda b: b.post("send", b.x, 0),
    r"names rank -1, which the mesh does not have": lambda b: b.post("send", b.x, -1),
    r"'all_reduce' raises ValueError: it names rank -1": lambda b: b.post("all_reduce", b.x, "sum", [0, -1], out=b.empty(*SHAPE)),
    r"gather to rank 0 of team \[0\], in which no rank gives": lambda b: b.post("gather", None, 0, 0, [0], out=b.empty(0, 12)),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_rank_refuses_as_it_posts_it(words: str) -> None:
    def build(b: Host) -> Sequence[fx.Node]:
        if b.me == 0:
            b.wait(REFUSED[words](b))
        return []

    run = LOCKSTEP.run(host_program(2, build))
    assert run.error is not None
    assert run.error.rank == 0
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(run.why)


MISSHAPEN: dict[str, Refused] = {
    r"all_gather writes shape \[24, 12\] into an output": lambda b: b.post("all_gather", b.x, 0, [0, 1], out=b.empty(12, 24)),
    r"all_reduce writes shape \[12, 12\] into": lambda b: b.post("all_reduce", b.x, "sum", [0, 1], out=b.empty(6, 12)),
    r"reduce_scatter cannot divide dim 0 of shape \[12, 12\] by 5": lambda b: b.post(
        "reduce_scatter", b.x, 0, "sum", [0, 1, 2, 3, 4], out=b.empty(2, 12)
    ),
    r"all_to_all cannot divide dim 0": lambda b: b.post("all_to_all", b.x, [0, 1, 2, 3, 4], out=b.empty(*SHAPE)),
    r"all_gather along dim 2 of shape \[12, 12\]": lambda b: b.post("all_gather", b.x, 2, [0, 1], out=b.empty(*SHAPE)),
    r"all_gather along dim -1 of shape": lambda b: b.post("all_gather", b.x, -1, [0, 1], out=b.empty(12, 24)),
    r"no output to write it into": lambda b: b.post("permute", b.x, [1, 0], [0, 1], out=None),
    r"which is not contiguous": lambda b: b.post("all_reduce", b.x, "sum", [0, 1], out=b.call("aten::t", b.empty(*SHAPE))),
    r"scatter cannot divide dim 0 of shape \[12, 12\] by 5": lambda b: b.post(
        "scatter", b.x, 0, 0, [0, 1, 2, 3, 4], out=b.empty(2, 12)
    ),
    r"gather cannot divide dim 0 of shape \[24, 12\] by 5": lambda b: b.post(
        "gather", None, 0, 0, [0, 1, 2, 3, 4, 5], out=b.empty(24, 12)
    ),
    r"broadcast has neither operand nor output": lambda b: b.post("broadcast", None, 1, [0, 1], out=None),
    r"all_reduce of torch.float32 into an output of torch.int64": lambda b: b.post(
        "all_reduce", b.x, "sum", [0, 1], out=b.empty(*SHAPE, dtype=torch.int64)
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", MISSHAPEN)
def test_what_the_shapes_refuse_as_it_is_written(words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        host_program(1, lambda b: [MISSHAPEN[words](b)])


def test_members_that_disagree_and_members_that_do_not_come() -> None:
    def roots(b: Host) -> Sequence[fx.Node]:
        return [b.wait(b.post("broadcast", b.x, b.me, [0, 1], out=b.empty(*SHAPE)))]

    run = LOCKSTEP.run(host_program(2, roots))
    assert run.mismatch is not None
    assert "rank 0 has root 0 while rank 1 has root 1" in run.mismatch[0]

    def alone(b: Host) -> Sequence[fx.Node]:
        return [b.wait(b.post("broadcast", b.x, 0, [0, 1], out=b.empty(*SHAPE)))] if b.me == 0 else []

    assert LOCKSTEP.run(host_program(2, alone)).hang is not None


def test_a_rank_that_the_world_lacks_never_comes() -> None:
    def team(b: Host) -> Sequence[fx.Node]:
        return [b.wait(b.post("all_reduce", b.x, "sum", [0, 1, 7], out=b.empty(*SHAPE)))]

    run = LOCKSTEP.run(host_program(2, team))
    assert not run.finished
    assert "7" in run.why

    run = LOCKSTEP.run(host_program(2, lambda b: [b.wait(b.post("send", b.x, 7))] if b.me == 0 else []))
    assert not run.finished
    assert "7" in run.why


# -------------------------------------------------------------------------------------------------------------- on gloo


def several(cases: Sequence[Case], teams: Sequence[list[int]], world_size: int, dtype: torch.dtype) -> Program:
    """All of these in one program, on every team: starting a program costs more than running it."""

    def build(b: Host) -> Sequence[fx.Node]:
        return [b.wait(case.post(b, team)) for team in teams if b.me in team for case in cases]

    return host_program(world_size, build, dtype)


def on_gloo(
    pool: Callable[[int], ProcessGroupPool], cases: dict[str, Case], teams: Sequence[list[int]], dtype: torch.dtype
) -> None:
    world_size = 2 if max(map(max, teams)) < 2 else 4
    made = several(list(cases.values()), teams, world_size, dtype)
    x = inputs(made)
    run = pool(world_size).run(made)
    assert run.finished, run.why
    for result in run.ranks:
        outputs = iter(result.outputs)
        for team in teams:
            if result.rank not in team:
                continue
            for name, case in cases.items():
                found, expected = next(outputs), case.expected(x, team).get(result.rank)
                if expected is None:
                    assert found.numel() == 0, (name, team)
                elif name in REDUCING:
                    torch.testing.assert_close(found, expected, msg=f"{name} on team {team}")
                else:
                    assert torch.equal(found, expected), (name, team)
        assert next(outputs, None) is None


@pytest.mark.parametrize("teams", [[[0, 1], [1, 0]], TEAMS[2:]], ids=["2 ranks", "4 ranks"])
def test_gloo_computes_the_same(pool: Callable[[int], ProcessGroupPool], teams: list[list[int]]) -> None:
    on_gloo(pool, CASES, teams, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.int64, torch.uint8], ids=str)
def test_gloo_moves_any_dtype(pool: Callable[[int], ProcessGroupPool], dtype: torch.dtype) -> None:
    on_gloo(pool, EXACT | JOINED, [[3, 1, 0]], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gloo_moves_and_adds_numbers_as_they_are(pool: Callable[[int], ProcessGroupPool], dtype: torch.dtype) -> None:
    """In the native domain: what lockstep computes, gloo computes, in the dtype itself."""
    made = several(list(CASES.values()), [[3, 1, 0]], 4, dtype)
    expected, found = LOCKSTEP.run(made, domain=NATIVE), pool(4).run(made, domain=NATIVE)
    assert expected.finished, expected.why
    assert found.finished, found.why
    for here, there in zip(expected.ranks, found.ranks, strict=True):
        for name, a, b in zip(CASES, here.outputs, there.outputs, strict=False):
            assert a.dtype == b.dtype == dtype, name
            if name in REDUCING:
                rounded = 6 * torch.finfo(dtype).eps  # three addends below 1, in different orders
                torch.testing.assert_close(a, b, rtol=rounded, atol=rounded, msg=name)
            else:
                assert torch.equal(a, b), name


def test_gloo_reduces_bits(pool: Callable[[int], ProcessGroupPool]) -> None:
    on_gloo(pool, BITS, [[2, 0, 3], [1, 0]], torch.int64)
    on_gloo(pool, BITS, [[2, 0, 3]], torch.int16)


def test_gloo_knows_teams_of_one(pool: Callable[[int], ProcessGroupPool]) -> None:
    on_gloo(pool, {name: case for name, case in CASES.items() if name not in JOINED}, [[1]], torch.float32)


def test_gloo_sends_and_receives(pool: Callable[[int], ProcessGroupPool]) -> None:
    pairs = [(0, 1), (1, 2), (2, 0), (3, 2), (1, 3)]
    made = host_program(4, sends(pairs))
    run = pool(4).run(made)
    assert run.finished, run.why
    x = inputs(made)
    for result in run.ranks:
        sources = [source for source, target in pairs if target == result.rank]
        assert len(result.outputs) == len(sources)
        assert all(torch.equal(found, x[source]) for found, source in zip(result.outputs, sources, strict=True))
