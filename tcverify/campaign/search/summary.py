"""What a search came to. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from tcverify.application import CodePoint
from tcverify.campaign.search.kernels import Rewrite
from tcverify.campaign.search.localisation import Suspect
from tcverify.program import Program


@dataclass(frozen=True, slots=True)
class KernelFound:
    """The smallest program that shows a behaviour.

    Attributes:
        reached: places of the pass that it was the first to reach.
        rewrite: ops that the pass removes (negative) and adds.
        changed: whether the pass changes it.
        rewritten: what the pass makes of it; None where it leaves it alone, or what it makes is no program.
    """

    program: Program
    reached: tuple[CodePoint, ...]
    rewrite: Rewrite
    changed: bool
    rewritten: Program | None = None


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """What a search came to.

    Attributes:
        behaviours: places of the pass that were reached, and rewrites that were seen.
        tried: programs that were made of kernels, and tried.
        further: those of them that are more than one edit away.
        skipped: programs that were made so, and not tried, since they contain a known cause.
        exhausted: kernels of which all edits were made.
        suspects: lines of the pass that kernels which are refuted have in common.
    """

    kernels: tuple[KernelFound, ...] = ()
    behaviours: int = 0
    tried: int = 0
    further: int = 0
    skipped: int = 0
    exhausted: int = 0
    suspects: tuple[Suspect, ...] = ()


__all__ = ["KernelFound", "SearchSummary"]
