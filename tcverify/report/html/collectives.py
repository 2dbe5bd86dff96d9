"""What each rank communicated, in order: data for the tables of the page."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from tcverify.execution import CollectiveCall, Run
from tcverify.ops import Collective, mismatch
from tcverify.report.html.values import ranks_text
from tcverify.report.sanitize import plural, sanitize

#: Most ranks listed separately in tables, most columns of collectives and ranks examined for them, and most
#: rows, this many of them above the first difference.
MAX_RANKS = 16
MAX_COLUMNS = 16
MAX_LOOKED_AT = 256
MAX_ROWS = 24
ROWS_ABOVE = 6


@dataclass(frozen=True, slots=True)
class Cell:
    """One collective of one rank, or how the rank ended.

    Attributes:
        state: "" for a collective that completed, "waits", "mismatch", "ended" or "raised".
        head: the kind of collective, or how the rank ended.
        group: the ordered communicator.
        detail: what it contributes.
        node: the node of the call.
    """

    state: str
    head: str
    group: str = ""
    detail: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveTimeline:
    """The collectives of one version. A row contains calls that complete together; the last rows contain calls that
    never complete.

    Attributes:
        columns: the ranks of each column, which make the same calls.
        rows: per row its number, the cells by column, None if a rank takes no part, and whether the row differs in the
            other version.
        omitted: what is omitted, in words.
    """

    caption: str
    columns: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...], bool], ...]
    omitted: str

    @property
    def headings(self) -> list[str]:
        return [ranks_text(ranks) for ranks in self.columns]


def timelines(before: Run | None, after: Run | None, first: Iterable[int] = ()) -> tuple[CollectiveTimeline, ...]:
    """Arrange the collectives of both versions, as far as they ran. Of long sequences, the rows around the first difference.

    Args:
        first: ranks that always get a column.
    """
    wanted = list(first)
    runs = [
        (run, caption) for run, caption in ((before, "Before the pass"), (after, "After the pass")) if run is not None
    ]
    runs = [(run, caption) for run, caption in runs if any(result.calls for result in run.ranks)]
    tables = [_table(run, wanted) for run, _ in runs]
    same = _same_ends([rows for _, rows in tables])
    return tuple(
        _arrange(run, caption, ranks, rows, same) for (run, caption), (ranks, rows) in zip(runs, tables, strict=True)
    )


_Rows = list[tuple[str, dict[int, "Cell | None"]]]


def _table(run: Run, first: Sequence[int]) -> tuple[list[int], _Rows]:
    """The examined ranks, and all rows, with the cells by rank."""
    world_size = len(run.ranks)
    ranks = sorted(list(dict.fromkeys([*first, *range(min(world_size, MAX_LOOKED_AT))]))[:MAX_LOOKED_AT])
    steps, stuck = _match(run)
    rows: _Rows = [(str(i + 1), {r: _cell(step.get(r), "") for r in ranks}) for i, step in enumerate(steps)]
    if any(r in stuck for r in ranks):
        state = "mismatch" if run.mismatch is not None else "waits"
        members = run.mismatch[1].keys() if run.mismatch is not None else stuck.keys()
        rows.append(("never", {r: _cell(stuck.get(r), state if r in members else "waits") for r in ranks}))
    rows.append(("end", {r: _end(run, r, r in stuck) for r in ranks}))
    return ranks, rows


def _same_ends(tables: Sequence[_Rows]) -> tuple[int, int]:
    """How many rows both versions have in common at the beginning and at the end."""
    if len(tables) < 2:
        return len(tables[0]) if tables else 0, 0
    whole = [[(c.head, c.group, c.detail, c.state) if c else None for c in cells.values()] for _, cells in tables[0]]
    if whole == [
        [(c.head, c.group, c.detail, c.state) if c else None for c in cells.values()] for _, cells in tables[1]
    ]:
        return len(whole), 0  # whatever the names of nodes are
    pairs = list(zip(*tables, strict=False))
    head = next((i for i, (a, b) in enumerate(pairs) if a[1] != b[1]), len(pairs))
    backwards = list(zip(reversed(tables[0][head:]), reversed(tables[1][head:]), strict=False))
    tail = next((i for i, (a, b) in enumerate(backwards) if a[1] != b[1]), len(backwards))
    return head, tail


def _arrange(run: Run, caption: str, ranks: Sequence[int], rows: _Rows, same: tuple[int, int]) -> CollectiveTimeline:
    head, tail = same
    columns: dict[tuple[Cell | None, ...], list[int]] = {}
    for rank in ranks:
        columns.setdefault(tuple(cells[rank] for _, cells in rows), []).append(rank)
    shown = [tuple(members) for members in columns.values()][:MAX_COLUMNS]
    table = [
        (number, tuple(cells[members[0]] for members in shown), head <= i < len(rows) - tail)
        for i, (number, cells) in enumerate(rows)
    ]
    omitted = []
    if len(table) > MAX_ROWS:
        start = min(max(0, head - ROWS_ABOVE), len(table) - MAX_ROWS) if head < len(table) else 0
        ends = [row for row in table[start + MAX_ROWS :] if row[0] in ("never", "end")]
        if start:
            omitted.append(f"rows 1 to {start}")
        after = len(table) - start - MAX_ROWS - len(ends)
        if after > 0:
            omitted.append(f"rows {start + MAX_ROWS + 1} to {start + MAX_ROWS + after}")
        table = [*table[start : start + MAX_ROWS], *ends]
    left_out = len(run.ranks) - sum(map(len, shown))
    if left_out:
        omitted.append(plural(left_out, "further rank"))
    return CollectiveTimeline(caption, tuple(shown), tuple(table), ", ".join(omitted))


def _match(run: Run) -> tuple[list[dict[int, CollectiveCall]], dict[int, CollectiveCall]]:
    """Replay the calls: which complete together, step by step, and which never complete, by rank."""
    queues = {result.rank: deque(result.calls) for result in run.ranks}
    steps: list[dict[int, CollectiveCall]] = []
    candidates = set(queues)
    while candidates:
        step: dict[int, CollectiveCall] = {}
        for rank in sorted(candidates):
            if rank not in step and queues[rank]:
                step.update(_meeting(queues, queues[rank][0], [m for m in queues if m not in step], depth=1))
        crossed = not step
        if crossed:  # asynchronous calls on several communicators may be issued in another order on another rank
            for queue in queues.values():
                step = step or (_meeting(queues, queue[0], list(queues), depth=None) if queue else {})
        for rank, call in step.items():
            queues[rank].remove(call)
        if step:
            steps.append(step)
        candidates = set(queues) if crossed and step else set(step)
        candidates |= {m for r in step if queues[r] for m in queues[r][0].collective.communicator if m in queues}
    return steps, {rank: queue[0] for rank, queue in queues.items() if queue}


def _meeting(
    queues: Mapping[int, deque[CollectiveCall]], call: CollectiveCall, free: Sequence[int], depth: int | None
) -> dict[int, CollectiveCall]:
    """The members' calls that meet `call`, by rank; none where one is missing.

    Args:
        free: ranks that may take part.
        depth: how many calls of each queue are examined.
    """
    found: dict[int, CollectiveCall] = {}
    for member in call.collective.communicator:
        ahead = islice(queues[member], depth) if member in free else ()
        other = next((c for c in ahead if c.collective.channel == call.collective.channel), None)
        if other is None:
            return {}
        found[member] = other
    return {} if mismatch([c.collective for c in found.values()]) is not None else found


def _cell(call: CollectiveCall | None, state: str) -> Cell | None:
    if call is None:
        return None
    collective = call.collective
    group = str(list(collective.communicator))
    if collective.group is not None:
        group = f"'{sanitize(collective.group)}' {group}"
    return Cell(state, collective.kind, group, contribution(collective), sanitize(call.node))


def contribution(collective: Collective) -> str:
    """What a rank contributes to a collective. The dtype is omitted: in lockstep it is that of the number domain."""
    parts = [str(list(collective.shape))]
    made = collective.resharding
    if made is not None:
        reduction = [] if made.dim is None else [f"{made.reduce_op} over dim {made.dim}"]
        return ", ".join([*parts, *reduction, f"{made.source} → {made.target}"])
    if collective.dim is not None:
        parts.append(f"dim {collective.dim}")
    if collective.reduce_op is not None:
        parts.append(collective.reduce_op)
    if collective.splits is not None:
        parts.append(f"in {list(collective.splits[0])} out {list(collective.splits[1])}")
    if collective.root is not None:
        parts.append(f"{'to' if collective.kind in ('gather', 'reduce') else 'from'} rank {collective.root}")
    if collective.targets is not None:
        parts.append(f"to positions {list(collective.targets)}")
    return ", ".join(parts)


def _end(run: Run, rank: int, stuck: bool) -> Cell:
    result = run.ranks[rank]
    if result.error is not None:
        return Cell("raised", "raises", detail=sanitize(result.error.message), node=sanitize(result.error.node))
    if run.mismatch is not None:
        at_fault = rank in run.mismatch[1]
        return Cell("mismatch" if at_fault else "ended", "disagrees" if at_fault else "stopped with the others")
    if stuck:
        return Cell("waits", "waits forever")
    return Cell("ended", "finished")


__all__ = ["Cell", "CollectiveTimeline", "contribution", "timelines"]
