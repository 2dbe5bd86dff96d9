"""What each rank communicated, in order, and who waits for whom: data for the tables of the page."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tcverify.execution import Call, Run
from tcverify.ops import Collective, mismatch
from tcverify.report.plain import count, plain

#: Most ranks that have a column, and most rows of a table.
MAX_RANKS = 16
MAX_ROWS = 60


@dataclass(frozen=True, slots=True)
class Cell:
    """One collective of one rank, or how the rank ended.

    Attributes:
        state: "" for a collective that completed, "waits", "mismatch", "ended" or "raised".
        head: the kind of collective, or the end in words.
        group: the ordered communicator.
        detail: what it contributes.
        node: that makes the call.
    """

    state: str
    head: str
    group: str = ""
    detail: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The collectives of one version. A row holds what completes together; the last rows hold what never does.

    Attributes:
        ranks: the columns.
        rows: per row its number and the cells by column; None where a rank takes no part.
        omitted: what is left out, in words.
    """

    caption: str
    ranks: tuple[int, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    omitted: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Ranks that wait for ever: `ranks[i]` waits for `ranks[i + 1]`.

    Attributes:
        sentences: what each waits in.
        cycle: whether the last waits for the first; else the last has finished.
    """

    ranks: tuple[int, ...]
    sentences: tuple[str, ...]
    cycle: bool


def waiting(run: Run) -> Waiting | None:
    """Describe the ranks of a run that wait for ever."""
    hang = run.hang
    if hang is None:
        return None
    ranks = [wait.rank for wait in hang.waits]
    sentences = [plain(f"{wait} (node '{wait.call.node}')") for wait in hang.waits]
    if hang.finished is not None:
        ranks.append(hang.finished)
        sentences.append(f"rank {hang.finished} has finished without joining")
    return Waiting(tuple(ranks), tuple(sentences), hang.cycle)


def timeline(run: Run, caption: str, first: Iterable[int] = ()) -> Timeline:
    """Arrange the collectives of a run.

    Args:
        first: ranks that have a column, however many ranks there are.
    """
    world_size = len(run.ranks)
    chosen = list(dict.fromkeys([*first, *range(min(world_size, MAX_RANKS))]))[:MAX_RANKS]
    ranks = tuple(sorted(chosen))
    steps, stuck = _match(run)
    rows = [(str(i + 1), tuple(_cell(step.get(r), "") for r in ranks)) for i, step in enumerate(steps)]
    left_out = len(rows) - MAX_ROWS
    omitted = []
    if left_out > 0:
        rows = [*rows[: MAX_ROWS // 2], *rows[-MAX_ROWS // 2 :]]
        omitted.append(f"rows {MAX_ROWS // 2 + 1} to {MAX_ROWS // 2 + left_out}")
    if any(r in stuck for r in ranks):
        state = "mismatch" if run.mismatch is not None else "waits"
        members = run.mismatch[1].keys() if run.mismatch is not None else stuck.keys()
        cells = tuple(_cell(stuck.get(r), state if r in members else "waits") for r in ranks)
        rows.append(("never", cells))
    rows.append(("end", tuple(_end(run, r, r in stuck) for r in ranks)))
    if world_size > len(ranks):
        omitted.append(count(world_size - len(ranks), "further rank"))
    return Timeline(caption, ranks, tuple(rows), " and ".join(omitted))


def _match(run: Run) -> tuple[list[dict[int, Call]], dict[int, Call]]:
    """Replay the calls: what completes together, step by step, and the calls that never complete, by rank."""
    queues = {result.rank: deque(result.calls) for result in run.ranks}
    steps: list[dict[int, Call]] = []
    candidates = set(queues)
    while candidates:
        step: dict[int, Call] = {}
        for rank in sorted(candidates):
            if rank in step or not queues[rank]:
                continue
            group = queues[rank][0].collective.communicator
            fronts = {m: queues[m][0] for m in group if queues.get(m) and m not in step}
            joined = len(fronts) == len(group) and all(c.collective.communicator == group for c in fronts.values())
            if joined and mismatch([fronts[m].collective for m in group]) is None:
                step.update(fronts)
        for rank in step:
            queues[rank].popleft()
        if step:
            steps.append(step)
        candidates = set(step)
        candidates |= {m for r in step if queues[r] for m in queues[r][0].collective.communicator if m in queues}
    return steps, {rank: queue[0] for rank, queue in queues.items() if queue}


def _cell(call: Call | None, state: str) -> Cell | None:
    if call is None:
        return None
    collective = call.collective
    group = str(list(collective.communicator))
    return Cell(state, collective.kind, group, contribution(collective), plain(call.node))


def contribution(collective: Collective) -> str:
    """What a rank brings to a collective. The dtype is left out: in lockstep it is that of the number domain."""
    parts = [str(list(collective.shape))]
    if collective.dim is not None:
        parts.append(f"dim {collective.dim}")
    if collective.reduce_op is not None:
        parts.append(collective.reduce_op)
    if collective.splits is not None:
        parts.append(f"in {list(collective.splits[0])} out {list(collective.splits[1])}")
    if collective.root is not None:
        parts.append(f"from rank {collective.root}")
    return ", ".join(parts)


def _end(run: Run, rank: int, stuck: bool) -> Cell:
    result = run.ranks[rank]
    if result.error is not None:
        return Cell("raised", "raises", detail=plain(result.error.message), node=plain(result.error.node))
    if run.mismatch is not None:
        at_fault = rank in run.mismatch[1]
        return Cell("mismatch" if at_fault else "ended", "disagrees" if at_fault else "stopped with the others")
    if stuck:
        return Cell("waits", "waits for ever")
    return Cell("ended", "finished")


__all__ = ["Cell", "Timeline", "Waiting", "contribution", "timeline", "waiting"]
