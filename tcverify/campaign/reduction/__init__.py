"""The graph reducer: the smallest program that still shows what is looked for."""

from tcverify.campaign.reduction.reducer import STRUCTURE, Reduction, reduce
from tcverify.campaign.reduction.suspects import suspects_of

__all__ = ["STRUCTURE", "Reduction", "reduce", "suspects_of"]
