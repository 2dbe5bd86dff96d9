"""Takes what a pass did apart, rewrite by rewrite, to name the one that is to blame."""

from tcverify.explain.bisection.bisecting import FindingTerms, bisect

__all__ = ["FindingTerms", "bisect"]
