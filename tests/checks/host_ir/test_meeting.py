"""Ranks in host IR that do not meet: what the check of collectives and the diagnosis say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tcverify import Contract, Verdict, verify
from tcverify.explain.diagnosis import diagnose
from tcverify.passes.resharding.writing import HostWriter
from tcverify.program import PlacedBuilder, Program


def exchanging(ranks: int = 2) -> Program:
    b = PlacedBuilder(ranks)
    mesh = str([*range(ranks)])
    x = b.input("x", (2 * ranks, 4), f"{mesh} shard(0)")
    return b.build(b.set(x, f"{mesh} replicated"), b.set(b.call("aten::relu", x), f"{mesh} replicated"))


Post = Callable[[HostWriter, int, int, fx.Node, fx.Node], None]


def lowered(post: Post, ranks: int = 2) -> Verdict:
    """What verification says of a pass that puts `post(writer, rank, which, operand, out)` in the place of each `set`."""

    def lower(gm: fx.GraphModule) -> fx.GraphModule:
        writer = HostWriter(gm.graph)
        sets = [node for node in gm.graph.nodes if "multidevice" in str(node.target)]
        for which, node in enumerate(sets):
            with writer.before(node):
                out = writer.allocate((2 * ranks, 4), torch.float32)
                post(writer, gm.meta["rank"], which, node.args[0], out)
            node.replace_all_uses_with(out)
            gm.graph.erase_node(node)
        gm.recompile()
        return gm

    return verify(lower, exchanging(ranks), contract=Contract(inputs="stream0"))


def gather(w: HostWriter, rank: int, which: int, x: fx.Node, out: fx.Node) -> None:
    w.communicate("all_gather", x, 0, [0, 1], out=out)


def first_divergence(verdict: Verdict) -> str:
    assert verdict.pair.rewritten is not None
    found = diagnose(verdict.pair.original, verdict.pair.rewritten, verdict.findings[0])
    assert found is not None
    assert found.first is not None
    return f"{found.first.node}: {found.first.relation.text}"


def test_ranks_that_meet_are_no_finding() -> None:
    assert lowered(gather).status == "passed"


def test_a_root_that_ranks_disagree_on() -> None:
    verdict = lowered(lambda w, rank, which, x, out: w.communicate("broadcast", out, rank, [0, 1], out=out) and None)
    (finding,) = verdict.findings
    assert (finding.kind, finding.title) == (
        "collective-mismatch", "ranks disagree: in broadcast, rank 0 has root 0 while rank 1 has root 1"
    )  # fmt: skip
    assert (finding.node, finding.rank) == ("broadcast", 0)
    assert "rank 1: broadcast: broadcast(float64[4, 4], root 1) of group [0, 1]" in finding.detail


def test_teams_in_other_orders_wait_for_each_other() -> None:
    verdict = lowered(
        lambda w, rank, which, x, out: w.communicate("all_gather", x, 0, [rank, 1 - rank], out=out) and None
    )
    (finding,) = verdict.findings
    assert (finding.kind, finding.title) == ("deadlock", "deadlock among ranks 0, 1")
    assert (
        "rank 0 waits in all_gather #1 of group [0, 1]\nrank 1 waits in all_gather #1 of group [1, 0]" in finding.detail
    )


def half(w: HostWriter, out: fx.Node, index: int) -> fx.Node:
    return w.call("aten::slice.Tensor", out, 0, 2 * index, 2 * index + 2)


def test_ranks_that_both_receive_first() -> None:
    def post(w: HostWriter, rank: int, which: int, x: fx.Node, out: fx.Node) -> None:
        w.communicate("recv", half(w, out, 1 - rank), 1 - rank)
        w.communicate("send", x, 1 - rank)

    (finding,) = lowered(post).findings
    assert finding.kind == "deadlock"
    assert "rank 0 waits in send_recv #1 from rank 1 to rank 0" in finding.detail


def test_a_message_that_nobody_receives() -> None:
    def post(w: HostWriter, rank: int, which: int, x: fx.Node, out: fx.Node) -> None:
        if rank == 0:
            w.communicate("send", x, 1)
        elif which == 0:
            w.communicate("recv", half(w, out, 0), 0)

    verdict = lowered(post)
    assert verdict.findings[0].kind == "deadlock"
    assert first_divergence(verdict) == ("send_1: posted by rank 0, but rank 1 posts 1 of 2 receives from rank 0")


def test_a_communication_of_another_name_on_the_other_rank_is_the_same() -> None:
    """Rank 1 receives where rank 0 sends, but gathers first."""

    def post(w: HostWriter, rank: int, which: int, x: fx.Node, out: fx.Node) -> None:
        message = (
            (lambda: w.communicate("send", x, 1)) if rank == 0 else (lambda: w.communicate("recv", half(w, out, 0), 0))
        )
        steps = [message, lambda: w.communicate("all_gather", x, 0, [1, 0], out=out)]
        for step in steps if rank == 0 else reversed(steps):
            step()

    verdict = lowered(post)
    assert verdict.findings[0].kind == "deadlock"
    assert "no such node" not in first_divergence(verdict)
    assert first_divergence(verdict) == "send: what rank 0 calls next, where rank 1 calls 'all_gather' first"


def crossing(*, behind: bool) -> Post:
    """Each rank receives on a worker, and sends on the caller's stream, or behind what it receives."""

    def post(w: HostWriter, rank: int, which: int, x: fx.Node, out: fx.Node) -> None:
        caller, worker = w.current_stream(), w.stream(which)
        w.call("aten::copy_", half(w, out, rank), x)
        w.set_stream(worker)
        w.synchronize(caller)
        w.communicate("recv", half(w, out, 1 - rank), 1 - rank)
        w.set_stream(worker if behind else caller)
        w.communicate("send", x, 1 - rank)
        w.set_stream(caller)
        w.synchronize(worker)

    return post


def test_streams_go_on_where_a_host_that_blocks_would_not() -> None:
    verdict = lowered(crossing(behind=False))
    assert verdict.status == "inconclusive"
    assert verdict.findings == []
    (doubt,) = verdict.doubts
    assert doubt.detail == (
        "hosts that block at waits wait forever (rank 0 waits in send_recv #1 from rank 1 to rank 0); streams would "
        "continue, but it was not run on streams"
    )


def test_streams_that_wait_for_each_other_are_a_deadlock() -> None:
    (finding,) = lowered(crossing(behind=True)).findings
    assert (finding.kind, finding.title) == ("deadlock", "deadlock among ranks 0, 1")


def test_a_communication_is_over_when_all_of_the_team_have_begun_it() -> None:
    """Rank 2 waits for a message that rank 0 sends behind what all three gather."""

    def post(w: HostWriter, rank: int, which: int, x: fx.Node, out: fx.Node) -> None:
        if rank == 2:
            w.communicate("recv", half(w, out, 0), 0)
        w.communicate("all_gather", x, 0, [0, 1, 2], out=out)
        if rank == 0:
            w.communicate("send", x, 2)

    (finding,) = lowered(post, ranks=3).findings
    assert finding.kind == "deadlock"


@pytest.mark.parametrize("apart", [False, True])
def test_teams_on_streams_of_their_own_may_come_in_any_order(apart: bool) -> None:
    """Two teams of the same ranks: on one stream their order matters, on two it does not."""

    def post(w: HostWriter, rank: int, which: int, x: fx.Node, out: fx.Node) -> None:
        caller = w.current_stream()
        wholes = [w.allocate((4, 4), torch.float32) for _ in range(2)]
        for i in (0, 1) if rank == 0 else (1, 0):
            w.set_stream(w.stream(i if apart else 0))
            w.synchronize(caller)
            w.communicate("all_gather", x, 0, [i, 1 - i], out=wholes[i])
        w.set_stream(caller)
        for i in range(2):
            w.synchronize(w.stream(i))
        w.call("aten::copy_", out, wholes[0])

    assert lowered(post).status == ("inconclusive" if apart else "refuted")
