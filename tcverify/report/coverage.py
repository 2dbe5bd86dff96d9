"""What was reached of a pass's code, what never was, and the kernels that reached it, as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from tcverify.campaign import FileReach
from tcverify.campaign.search import KernelFound, SearchSummary
from tcverify.ops import qualified_name
from tcverify.report.alignment import align
from tcverify.report.listing import ListingLine, graph_lines, listing_difference, op_text
from tcverify.report.sanitize import plural, sanitize
from tcverify.system.files import source_name

#: Number of entries of each kind that are shown; events.ndjson contains all.
MAX_ENTRIES = 20

#: Number of places, single lines or ranges, that are listed as first reached by a kernel.
MOST_PLACES = 4


def reach_line(files: Sequence[FileReach]) -> str:
    """The share of the files that was reached, files that define the pass first."""
    lines, outcomes = sum(one.lines for one in files), sum(one.outcomes for one in files)
    ran, went = sum(one.lines_reached for one in files), sum(one.outcomes_reached for one in files)
    name = source_name(files[0].file)
    where = name if len(files) == 1 else f"{name} and {len(files) - 1} more"
    return sanitize(f"coverage of {where}: {ran} of {lines} lines, {went} of {outcomes} outcomes of conditions")


def searched_line(searched: SearchSummary) -> str:
    """The result of a search, as a sentence that a user may quote."""
    number = len(searched.kernels)
    shown = f"{plural(number, 'kernel')} ({plural(searched.behaviours, 'behaviour')})"
    if searched.exhausted == number and not searched.skipped:
        line = f"searched: every program one edit away from {shown} was tried, {searched.tried:,} in all"
        return line + (f", {searched.further:,} of them further away" if searched.further else "")
    line = f"searched: {shown}; {plural(searched.tried - searched.further, 'program')} one edit away from them tried"
    line += f", all of those of {searched.exhausted:,}" if searched.exhausted else ""
    line += f"; {searched.further:,} further away" if searched.further else ""
    return line + (f"; {searched.skipped:,} with a known cause skipped" if searched.skipped else "")


def suspect_lines(searched: SearchSummary) -> list[str]:
    """Lines of the pass that most failing programs reach, and few passing ones."""
    found = []
    for one in searched.suspects:
        lines = f"{one.first}" if one.first == one.last else f"{one.first}-{one.last}"
        often = f"{one.wrong} of {plural(one.of_wrong, 'failing kernel')}"
        found.append(
            sanitize(
                f"suspect: {source_name(one.file)}:{lines}, reached by {often} and by {one.passed} of {one.of_passed} passing"
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class KernelPattern:
    """Kernels that the pass rewrites in the same way.

    Attributes:
        words: the rewrite: "all_reduce ⇒ reduce_scatter + all_gather".
        kernels: the smallest first.
    """

    words: str
    kernels: tuple[KernelFound, ...]

    @property
    def changed(self) -> bool:
        """Whether the pass changes them."""
        return self.kernels[0].changed


def group_kernels(searched: SearchSummary) -> list[KernelPattern]:
    """The kernels by rewrite: those that the pass changes first, and among these those with the smallest kernels."""
    found: dict[object, list[KernelFound]] = {}

    def order(one: KernelFound) -> tuple[object, ...]:
        return not one.changed, one.rewritten is None, one.program.size, not one.rewrite, len(one.rewrite)

    for kernel in sorted(searched.kernels, key=order):
        found.setdefault((kernel.changed, kernel.rewrite or rewrite_words(kernel)), []).append(kernel)
    return [KernelPattern(rewrite_words(kernels[0]), tuple(kernels)) for kernels in found.values()]


def rewrite_words(kernel: KernelFound) -> str:
    """What the pass does with a kernel: the ops that it removes and adds, in order; or those whose operands or position
    it changes."""
    if not kernel.changed:
        return "unchanged"
    removed, added = _counts(kernel)
    if removed or added:
        names = _short_names([*removed, *added])
        before, after = (" + ".join(_times(n, names[op]) for op, n in counts.items()) for counts in (removed, added))
        return f"{before} ⇒ {after}" if before and after else f"drops {before}" if before else f"adds {after}"
    if kernel.rewritten is None:
        return "changed"
    rows = align(kernel.program, kernel.rewritten, changed_rank(kernel))
    verbs = {"inserted": "replaces", "moved": "moves", "changed": "rewires"}
    parts = []
    for mark, verb in verbs.items():
        ops = list(dict.fromkeys(_op(row.after) for row in rows if row.mark == mark and row.after is not None))
        parts += [f"{verb} {' + '.join(_short_names(ops).values())}"] * bool(ops)
    return ", ".join(parts) or "changed"


def changed_rank(kernel: KernelFound) -> int:
    """The first rank whose graph the pass changes, as a listing shows it; 0 if there is none."""
    if kernel.rewritten is None:
        return 0
    seen: set[tuple[int, int]] = set()
    for rank, (old, new) in enumerate(zip(kernel.program.ranks, kernel.rewritten.ranks, strict=True)):
        if (old.graph, new.graph) not in seen:
            seen.add((old.graph, new.graph))
            if any(line.mark != " " for line in listing_difference(kernel.program, kernel.rewritten, rank)):
                return rank
    return 0


def kernel_listing(kernel: KernelFound) -> list[ListingLine]:
    """The graph of a kernel on the rank from `changed_rank`, as before ⇒ after if the pass changes it."""
    if kernel.rewritten is not None:
        found = listing_difference(kernel.program, kernel.rewritten, changed_rank(kernel))
    else:
        found = [ListingLine(" ", name, text) for name, text in graph_lines(kernel.program, 0)]
    return [ListingLine(line.mark, line.node, sanitize(line.text)) for line in found]


def first_to_reach(kernel: KernelFound) -> str:
    """The code of the pass that a kernel was the first to reach; "" if none."""
    lines: dict[str, set[int]] = {}
    for point in kernel.reached:
        lines.setdefault(Path(point.file).name, set()).add(point.line)
    places = [f"{name}:{run}" for name, numbers in lines.items() for run in _runs(sorted(numbers))]
    return sanitize(f"first to reach {', '.join(places[:MOST_PLACES])}") if places else ""


def kernel_lines(searched: SearchSummary) -> list[ListingLine]:
    """The patterns that the pass knows: the smallest kernel of each, before ⇒ after the pass."""
    lines: list[ListingLine] = []

    def line(text: str = "") -> None:
        lines.append(ListingLine(" ", "", text))

    for pattern in group_kernels(searched):
        kernel, more = pattern.kernels[0], len(pattern.kernels) - 1
        line()
        line(f"kernel: {pattern.words}")
        if where := first_to_reach(kernel):
            line(f"  {where}")
        if rank := changed_rank(kernel):
            line(f"  on rank {rank}")
        lines += [ListingLine(one.mark, one.node, f"  {one.mark} {one.text}") for one in kernel_listing(kernel)]
        if more:
            same = "with this rewrite" if pattern.changed else "unchanged"
            line(f"  {plural(more, 'more kernel')} {same}")
    return lines


def _op(node: fx.Node) -> str:
    return qualified_name(node.target) if node.op == "call_function" else op_text(node)


def _counts(kernel: KernelFound) -> tuple[dict[str, int], dict[str, int]]:
    """Counts of the ops that the pass removes and adds."""
    if kernel.rewritten is None:
        return {op: -n for op, n in kernel.rewrite if n < 0}, {op: n for op, n in kernel.rewrite if n > 0}
    rank = changed_rank(kernel)
    before, after = (
        Counter(
            qualified_name(node.target)
            for node in program.graphs[program.ranks[rank].graph].nodes
            if node.op == "call_function"
        )
        for program in (kernel.program, kernel.rewritten)
    )
    return dict(before - after), dict(after - before)


def _times(number: int, name: str) -> str:
    return name if number == 1 else f"{number} × {name}"


def _short_names(ops: Sequence[str]) -> dict[str, str]:
    """Short names of ops: without namespace and overload, unless two names would be equal."""
    forms: list[Callable[[str], str]] = [
        lambda op: op.split("::")[-1].split(".")[0],
        lambda op: op.split("::")[-1],
        str,
    ]
    return {
        op: sanitize(next(form(op) for form in forms if [form(one) for one in ops].count(form(op)) == 1)) for op in ops
    }


def unreached_lines(files: Sequence[FileReach], most: int = MAX_ENTRIES) -> list[str]:
    """What was never reached: a line per file and kind, with a limited number of entries; none if everything was reached."""
    found: list[str] = []
    for one in files:
        name = source_name(one.file)
        runs = [_run(first, last) for first, last in one.unreached]
        found += [f"{name} line {_listed(runs, most)}"] * bool(runs)
        found += [f"{name}: false on line {_listed([str(line) for line in one.always_true], most)}"] * bool(
            one.always_true
        )
        found += [f"{name}: a call of {_listed(one.uncalled, most)}"] * bool(one.uncalled)
    return [sanitize(line) for line in found]


def _runs(lines: Sequence[int]) -> list[str]:
    """Sorted line numbers, with ranges: "11-13"."""
    starts = [i for i, line in enumerate(lines) if i == 0 or line != lines[i - 1] + 1]
    return [_run(lines[first], lines[end - 1]) for first, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


def _run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _listed(entries: Sequence[str], most: int) -> str:
    more = len(entries) - most
    return ", ".join(entries[:most]) + (f", and {more} more" if more > 0 else "")


__all__ = [
    "KernelPattern",
    "changed_rank",
    "first_to_reach",
    "group_kernels",
    "kernel_lines",
    "kernel_listing",
    "reach_line",
    "rewrite_words",
    "searched_line",
    "suspect_lines",
    "unreached_lines",
]
