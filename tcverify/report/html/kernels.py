"""kernels.html: the patterns of passes that a run has found, each drawn before ⇒ after. One self-contained file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tcverify.campaign import CampaignFinished, Event, RunFinished
from tcverify.campaign.search import KernelFound
from tcverify.report.alignment import align
from tcverify.report.coverage import (
    KernelPattern,
    changed_rank,
    first_to_reach,
    group_kernels,
    kernel_listing,
    searched_line,
)
from tcverify.report.html.document import render
from tcverify.report.html.graph import SIGNS, Drawing, Labels, draw
from tcverify.report.listing import ListingLine
from tcverify.report.sanitize import one_line, plural, sanitize
from tcverify.system.files import write_atomically

PAGE_NAME = "kernels.html"

#: Number of kernels that a page draws; the smallest of each rewrite come first.
MOST_DRAWN = 60

#: Number of kernels that the pass leaves unchanged, listed as text, per pass and mesh.
MOST_LISTED = 40

#: Lines of a listing.
MOST_LINES = 80


@dataclass(frozen=True, slots=True)
class Plate:
    """One kernel. Every text is one line without control characters, not yet escaped for HTML.

    Attributes:
        anchor: its id in the page.
        facts: the code of the pass that it reached first, and its size.
        listing: its graph, before ⇒ after; `left_out` lines are omitted.
        drawing: None if the pass leaves it unchanged, or returns no valid program.
    """

    anchor: str
    facts: str
    listing: tuple[ListingLine, ...]
    left_out: int
    drawing: Drawing | None


@dataclass(frozen=True, slots=True)
class RewriteGroup:
    """A rewrite and the kernels that show it, smallest first.

    Attributes:
        words: the rewrite.
        kernels: how many there are; `plates` may be fewer.
    """

    words: str
    kernels: int
    plates: tuple[Plate, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """The patterns found of a pass on one mesh.

    Attributes:
        groups: rewrites; `left_out` more are omitted.
        alone: kernels that the pass leaves unchanged; `alone_left_out` more are omitted.
    """

    anchor: str
    title: str
    facts: str
    groups: tuple[RewriteGroup, ...]
    left_out: int
    alone: tuple[Plate, ...]
    alone_left_out: int


@dataclass(frozen=True, slots=True)
class KernelPage:
    """All that the page shows."""

    title: str
    sections: tuple[Section, ...]


def to_kernel_page(finished: Sequence[CampaignFinished]) -> str:
    """Return the page of the kernels that campaigns have found. Foreign text is escaped, as in `to_html`."""
    return render("kernels.html.j2", page=make_kernel_page(finished))


def make_kernel_page(finished: Sequence[CampaignFinished]) -> KernelPage:
    """Arrange the kernels of campaigns for the page: a section for each campaign with a kernel that the pass changes."""
    found = [
        (event, group_kernels(event.searched)) for event in finished if event.searched is not None and _shows(event)
    ]
    ranked = sorted(
        (place, number, which)
        for number, (_, all_patterns) in enumerate(found)
        for which, pattern in enumerate(all_patterns)
        for place in range(len(pattern.kernels))
        if pattern.changed
    )
    chosen = set(ranked[:MOST_DRAWN])
    sections = []
    for number, (event, all_patterns) in enumerate(found):
        shares = [
            sum((place, number, which) in chosen for place in range(len(pattern.kernels)))
            for which, pattern in enumerate(all_patterns)
        ]
        sections.append(_section(number, event, all_patterns, shares))
    names = list(dict.fromkeys(sanitize(event.facts.name) for event, _ in found))
    return KernelPage(f"What {names[0]} does" if len(names) == 1 else "What the passes do", tuple(sections))


def _shows(event: CampaignFinished) -> bool:
    return event.searched is not None and any(kernel.changed for kernel in event.searched.kernels)


def _section(number: int, event: CampaignFinished, found: Sequence[KernelPattern], shares: Sequence[int]) -> Section:
    """Arrange the kernels of one campaign.

    Args:
        shares: how many kernels of each pattern the page draws.
    """
    assert event.searched is not None  # it shows a rewrite
    anchor = f"pass-{number + 1}"
    changed = [(pattern, share) for pattern, share in zip(found, shares, strict=True) if pattern.changed]
    alone = [kernel for pattern in found if not pattern.changed for kernel in pattern.kernels]
    groups = [
        RewriteGroup(
            pattern.words,
            len(pattern.kernels),
            tuple(
                _plate(f"{anchor}-rewrite-{which}" + f"-{place}" * (place > 1), kernel)
                for place, kernel in enumerate(pattern.kernels[:share], 1)
            ),
        )
        for which, (pattern, share) in enumerate(changed, 1)
        if share
    ]
    programs = plural(event.statistics.programs, "program")
    return Section(
        anchor=anchor,
        title=sanitize(f"{event.facts.name} on {event.mesh}"),
        facts=sanitize(f"{programs}, seed {event.seed}; {searched_line(event.searched)}"),
        groups=tuple(groups),
        left_out=len(changed) - len(groups),
        alone=tuple(_plate(f"{anchor}-alone-{i}", kernel) for i, kernel in enumerate(alone[:MOST_LISTED], 1)),
        alone_left_out=max(0, len(alone) - MOST_LISTED),
    )


def _plate(anchor: str, kernel: KernelFound) -> Plate:
    rank, lines = changed_rank(kernel), kernel_listing(kernel)
    drawing = None
    size = plural(kernel.program.size, "node")
    if kernel.rewritten is not None:
        labels = Labels(("Before the pass", "After the pass"), SIGNS, "p", {})
        drawing = draw(kernel.program, align(kernel.program, kernel.rewritten, rank), {}, labels)
        size = f"{size} ⇒ {kernel.rewritten.size}"
    elif kernel.changed:
        size += "; the rewritten graph cannot be shown"
    where = first_to_reach(kernel)
    facts = [size, *([f"on rank {rank}"] if rank else []), *([where] if where else [])]
    return Plate(anchor, "; ".join(facts), tuple(lines[:MOST_LINES]), max(0, len(lines) - MOST_LINES), drawing)


class KernelReport:
    """Subscribes to a run and writes kernels.html again after each campaign that has found a kernel which the pass changes.

    Args:
        tell: called with one line at the end of the run: where the page is, or why it cannot be written.
    """

    def __init__(self, report_dir: Path, tell: Callable[[str], None]) -> None:
        self.path = report_dir / PAGE_NAME
        self.tell = tell
        self._finished: list[CampaignFinished] = []
        self._written = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, CampaignFinished) and _shows(event):
            self._finished.append(event)
            self._write()
        elif isinstance(event, RunFinished) and self._written and not event.error:
            self.tell(f"kernels: {self.path}")

    def _write(self) -> None:
        try:
            write_atomically(self.path, to_kernel_page(self._finished))
        except Exception as error:  # noqa: BLE001 - a page that cannot be made must not end the run
            self._written = False
            self.tell(f"{self.path} was not written: {one_line(error)}")
        else:
            self._written = True


__all__ = ["PAGE_NAME", "KernelPage", "KernelReport", "make_kernel_page", "to_kernel_page"]
