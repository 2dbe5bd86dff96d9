"""Schedule: the replay of a lowered graph confirms the times that it declares, and they beat sequential execution."""

from __future__ import annotations

from typing import Any

from torch import fx

from tcverify.checks.evidence import Evidence
from tcverify.checks.streams.anchors import lowered_ranks, reading_of
from tcverify.checks.streams.reading import StreamReading, parse_seconds
from tcverify.checks.streams.replay import StreamReplay, replay_reading, replay_streams
from tcverify.ops import TensorSpec, qualified_name
from tcverify.program import Program
from tcverify.program.finding import Doubt, Finding
from tcverify.program.graph import map_structure

CHECK = "schedule"

#: Minimum duration of an op in a schedule, in seconds.
LEAST_COST_S = 1e-6

#: The fields of `meta["schedule"]` of the output node, in seconds.
DECLARED = ("makespan_s", "serial_s", "critical_path_s", "sync_overhead_s")


def check_schedule(evidence: Evidence) -> list[Finding | Doubt]:
    """Report costs that are missing or changed, times that the replay does not confirm, and schedules without a gain.

    Covers lowered graphs that declare a schedule, or all lowered graphs if the contract promises one. One finding: the
    first on the lowest rank. If the contract promises overlap, communication that is exposed for longer is another finding.
    """
    rewritten = evidence.pair.rewritten
    if rewritten is None or not evidence.pair.changed:
        return []
    original = evidence.pair.original
    for reading, ranks in lowered_ranks(rewritten):
        if reading.schedule is None and not evidence.contract.schedule:
            continue
        given: dict[int, int] = {}  # graph of the original -> first rank that had it
        for rank in ranks:
            given.setdefault(original.ranks[rank].graph, rank)
        for rank in given.values():
            finding = _judge(original, rewritten, reading, rank)
            if finding is not None:
                return [finding]
    exposed = _exposed(original, rewritten) if evidence.contract.overlap else None
    return [] if exposed is None else [exposed]


def _exposed(original: Program, rewritten: Program) -> Finding | None:
    """The first rank on which communication is exposed for longer than before, lowered or not."""
    judged = set()
    for rank, graphs in enumerate(zip(original.ranks, rewritten.ranks, strict=True)):
        numbers = graphs[0].graph, graphs[1].graph
        if numbers in judged:
            continue
        judged.add(numbers)
        asynchronous = any(reading_of(p, rank).asynchronous for p in (original, rewritten))
        least = 0.0 if asynchronous else LEAST_COST_S
        times = [replay_streams(p, rank, least_cost_s=least) for p in (original, rewritten)]
        before, after = (found.exposed_s for found in times)
        # Sums in another order differ by rounding.
        slack = 1e-9 * (times[0].makespan_s or 0.0) if asynchronous else 0.0
        if before is not None and after is not None and after > before * (1 + 1e-9) + slack:
            now, then = _both(after, before)
            title = f"communication is exposed for {now} after the pass, for {then} before"
            data = {"before_s": before, "after_s": after}
            node, detail = _stalls(times[0], times[1])
            return Finding("exposed-communication", CHECK, title, detail, node, rank, data)
    return None


#: Number of stalls that a detail names, longest first.
_MOST_STALLS = 4


def _stalls(before: StreamReplay, after: StreamReplay) -> tuple[str | None, str]:
    """Where compute waits for longer than before: the node with the largest increase, and some of them in words."""
    lengths: list[dict[str, float]] = [{}, {}]
    for found, length in zip((before, after), lengths, strict=True):
        for stall in found.stalls:
            length[stall.node] = length.get(stall.node, 0.0) + stall.end_s - stall.start_s
    then, now = lengths
    grown = sorted((name for name in now if now[name] > then.get(name, 0.0)), key=lambda n: then.get(n, 0.0) - now[n])
    awaited = {stall.node: stall.awaited for stall in after.stalls}
    lines = []
    for name in grown[:_MOST_STALLS]:
        longer, shorter = _both(now[name], then.get(name, 0.0))
        what = "" if awaited[name] in ("", name) else f" for '{awaited[name]}'"
        lines.append(f"compute waits at '{name}'{what}: {longer}, {shorter} before")
    return (grown[0] if grown else None), "\n".join(lines)


def _judge(original: Program, rewritten: Program, reading: StreamReading, rank: int) -> Finding | None:
    output = reading.output.name if reading.output is not None else None
    declared = reading.schedule
    if declared is None:
        title = f"'{output}' declares no schedule, although the pass promises one"
        return _wrong(title, _HINT, output, rank)
    problem = _malformed(declared)
    if problem is not None:
        return _wrong(f"the schedule that '{output}' declares {problem}", _HINT, output, rank)
    finding = _costs(original, rewritten, reading, rank)
    if finding is not None:
        return finding
    streams = original.streams
    if streams is not None and declared["sync_overhead_s"] != streams.sync_overhead_s:
        said, meant = _both(declared["sync_overhead_s"], streams.sync_overhead_s)
        title = f"the schedule assumes a synchronisation overhead of {said}, but the program has {meant}"
        return _wrong(title, _OVERHEAD, output, rank)
    return _times(declared, replay_reading(reading, original), output, rank)


_HINT = f"meta['schedule'] of the output node holds {', '.join(DECLARED)}; or --contract schedule=false"

_OVERHEAD = "the program says it in gm.meta['streams'].sync_overhead_s"
_NO_GAIN = "leave a graph without a gain unchanged"


def _malformed(declared: Any) -> str | None:
    if not isinstance(declared, dict):
        return f"is not a dict, but a {type(declared).__name__}"
    for key in DECLARED:
        if key not in declared:
            return f"lacks '{key}'"
        if parse_seconds(declared[key]) is None:
            return f"gives no time for '{key}': {str(declared[key])[:40]}"
    return None


def _costs(original: Program, rewritten: Program, reading: StreamReading, rank: int) -> Finding | None:
    """Every op has a cost: that of the node of the same name in the original, if that is the same op and has one."""
    before = {n.name: n for n in original.graphs[original.ranks[rank].graph].nodes if "cost_s" in n.meta}
    after = {n.name: n for n in rewritten.graphs[rewritten.ranks[rank].graph].nodes}
    for op in reading.ops:
        node, same = after[op.name], before.get(op.name)
        if op.cost_s is None:
            said = str(node.meta["cost_s"])[:40] if "cost_s" in node.meta else None
            what = f"is {said}, which is not a time" if said is not None else "is missing"
            return _wrong(f"meta['cost_s'] of '{op.name}' {what}", "", op.name, rank)
        # An earlier stage may have changed the operands of the op, and thus its cost.
        if same is None or not _same_work(same, node):
            continue
        given = parse_seconds(same.meta["cost_s"])
        if given is not None and op.cost_s != max(LEAST_COST_S, given):
            reckoned, meant = _both(op.cost_s, max(LEAST_COST_S, given))
            title = f"the schedule assumes {reckoned} for '{op.name}', but the op takes {meant}"
            return _wrong(title, "", op.name, rank)
    return None


def _same_work(first: fx.Node, second: fx.Node) -> bool:
    """Whether two nodes call the same op with results of the same shape, according to metadata."""

    def shape(spec: Any) -> Any:
        return (spec.shape, spec.dtype) if isinstance(spec, TensorSpec) else spec

    if first.op != second.op or qualified_name(first.target) != qualified_name(second.target):
        return False
    before, after = first.meta.get("val"), second.meta.get("val")
    return before is None or after is None or bool(map_structure(shape, before) == map_structure(shape, after))


def _times(declared: dict[str, float], real: StreamReplay, output: str | None, rank: int) -> Finding | None:
    makespan, serial, critical = real.makespan_s, real.serial_s, real.critical_path_s
    if makespan is None or serial is None or critical is None:
        return None
    detail = _overview(declared, real)
    data = {"declared": {key: declared[key] for key in DECLARED}}
    data["replayed"] = {"makespan_s": makespan, "serial_s": serial, "critical_path_s": critical}
    for key, what, value in (("makespan_s", "a makespan", makespan), ("serial_s", "a serial time", serial)):
        if declared[key] != value:
            said, found = _both(declared[key], value)
            title = f"the schedule predicts {what} of {said}, but the replay gives {found}"
            return _wrong(title, detail, output, rank, data)
    for whose, bound in (("its own", declared["critical_path_s"]), ("the", critical)):
        if bound > makespan:
            path, total = _both(bound, makespan)
            title = f"the schedule's makespan of {total} is below {whose} critical path of {path}"
            return _wrong(title, detail, output, rank, data)
    if makespan >= serial:
        total, sum_ = _both(makespan, serial)
        title = f"the schedule takes {total}, not less than the {sum_} of running op after op"
        return Finding("no-gain", CHECK, title, f"{_NO_GAIN}\n{detail}", output, rank, data)
    return None


def _overview(declared: dict[str, float], real: StreamReplay) -> str:
    rows = [f"{'':13}  declared   replayed"]
    for key, value in (
        ("makespan_s", real.makespan_s),
        ("serial_s", real.serial_s),
        ("critical_path_s", real.critical_path_s),
        ("sync_overhead_s", real.overhead_s),
    ):
        name = key.removesuffix("_s").replace("_", " ").replace("sync ", "")
        rows.append(f"{name:13}  {declared[key] * 1e6:8.3f}   {(value or 0.0) * 1e6:8.3f}  µs")
    return "\n".join(rows)


def _both(first: float, second: float) -> tuple[str, str]:
    """Two times in µs, with enough digits to distinguish them."""
    for digits in (4, 7, 10, 13, 17):
        texts = f"{first * 1e6:.{digits}g} µs", f"{second * 1e6:.{digits}g} µs"
        if texts[0] != texts[1] or first == second:
            break
    return texts


def _wrong(title: str, detail: str, node: str | None, rank: int, data: dict[str, Any] | None = None) -> Finding:
    return Finding("wrong-schedule", CHECK, title, detail, node, rank, data or {})


__all__ = ["check_schedule"]
