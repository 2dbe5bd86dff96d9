"""The search: programs that are made of what the pass did with earlier ones.

A *behaviour* is a place of the pass's code that a program reaches (a line, or an outcome of a condition), or a rewrite (which ops
go and which come). A program that shows a new behaviour is reduced to its *kernel*: the smallest program that still shows it.
That takes applications of the pass alone. Programs one edit away from a kernel are tried next, those first that may turn a
condition of which one outcome was never seen.
"""

from tcverify.campaign.search.summary import KernelFound, SearchSummary
from tcverify.campaign.search.turns import ProgramSearch, search_of

__all__ = ["KernelFound", "ProgramSearch", "SearchSummary", "search_of"]
