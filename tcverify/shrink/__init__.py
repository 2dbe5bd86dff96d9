"""The graph reducer: the smallest program that still shows what is looked for."""

from tcverify.shrink.graph.suspects import suspects_of
from tcverify.shrink.reducer import COARSE, Reduction, reduce

__all__ = ["COARSE", "Reduction", "reduce", "suspects_of"]
