"""The graph reducer: the smallest program that still shows what is looked for."""

from tcverify.campaign.reduction.reducer import Reduction, reduce

__all__ = ["Reduction", "reduce"]
