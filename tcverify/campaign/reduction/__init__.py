"""The graph reducer: the smallest program that still shows what is looked for."""

from tcverify.campaign.reduction.reducer import COARSE, Reduction, reduce
from tcverify.campaign.reduction.suspects import suspects_of

__all__ = ["COARSE", "Reduction", "reduce", "suspects_of"]
