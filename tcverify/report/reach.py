"""What was reached of a pass's code, what never was, and the kernels that showed it, in lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tcverify.campaign import FileReach
from tcverify.campaign.search import Searched
from tcverify.files import source_name
from tcverify.report.listing import graph_lines
from tcverify.report.plain import count, plain

#: Entries that are shown of each kind; events.ndjson holds all.
MAX_ENTRIES = 20

#: Places that are named of what a kernel is the first to reach.
MOST_PLACES = 4


def reach_line(files: Sequence[FileReach]) -> str:
    """How much was reached of the files, those that define the pass first."""
    lines, outcomes = sum(one.lines for one in files), sum(one.outcomes for one in files)
    ran, went = sum(one.lines_reached for one in files), sum(one.outcomes_reached for one in files)
    name = source_name(files[0].file)
    where = name if len(files) == 1 else f"{name} and {len(files) - 1} more"
    return plain(f"reached of {where}: {ran} of {lines} lines, {went} of {outcomes} outcomes of conditions")


def searched_line(searched: Searched) -> str:
    """What a search came to, in a sentence that a user may quote."""
    number = len(searched.kernels)
    shown = f"{count(number, 'kernel')} ({count(searched.behaviours, 'behaviour')})"
    if searched.exhausted == number and not searched.skipped:
        return f"searched: every program one edit away from {shown} was tried, {searched.tried:,} in all"
    line = f"searched: {shown}; {count(searched.tried, 'program')} one edit away from them tried"
    line += f", all of those of {searched.exhausted:,}" if searched.exhausted else ""
    return line + (f"; {searched.skipped:,} with a known cause left out" if searched.skipped else "")


def kernel_lines(searched: Searched) -> list[str]:
    """The kernels, each as the graph of rank 0 with what the pass does with it; those that the pass changes first."""
    lines: list[str] = []
    for kernel in sorted(searched.kernels, key=lambda one: (not one.changed, one.program.size)):
        rewrite = ", ".join(f"{'+' if n > 0 else '-'}{op.split('::')[-1]}" for op, n in kernel.rewrite)
        lines += ["", f"kernel: {rewrite or ('changed' if kernel.changed else 'left as it is')}"]
        places = list(dict.fromkeys(f"{Path(point.file).name}:{point.line}" for point in kernel.reached))
        where = ", ".join(places[:MOST_PLACES])
        lines += [f"  first to reach {where}"] if where else []
        lines += [f"    {plain(text)}" for _, text in graph_lines(kernel.program, 0)]
    return lines


def unreached_lines(files: Sequence[FileReach]) -> list[str]:
    """What was never reached: a line per file and kind, none where everything was."""
    found: list[str] = []
    for one in files:
        name = source_name(one.file)
        runs = [str(first) if first == last else f"{first}-{last}" for first, last in one.unreached]
        found += [f"{name} line {_listed(runs)}"] * bool(runs)
        found += [f"{name}: false on line {_listed([str(line) for line in one.always_true])}"] * bool(one.always_true)
        found += [f"{name}: a call of {_listed(one.uncalled)}"] * bool(one.uncalled)
    return [plain(line) for line in found]


def _listed(entries: Sequence[str]) -> str:
    more = len(entries) - MAX_ENTRIES
    return ", ".join(entries[:MAX_ENTRIES]) + (f", and {more} more" if more > 0 else "")


__all__ = ["kernel_lines", "reach_line", "searched_line", "unreached_lines"]
