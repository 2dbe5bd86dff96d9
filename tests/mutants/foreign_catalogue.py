"""The small passes of `foreign`, `foreign_groups`, `foreign_local` and `tiny`: which are sound, and which are mutants."""

from __future__ import annotations

from tests.mutants import foreign, foreign_groups, foreign_local, tiny
from tests.mutants.foreign import Foreign

_MODULES = (foreign, foreign_groups, foreign_local, tiny)

#: Sound passes. What else the modules define has a defect.
SOUND: tuple[type[Foreign], ...] = (
    foreign.SinkAllReduce,
    foreign.NormBelowGather,
    foreign.ReduceByGather,
    foreign.ScatterFirstDim,
    foreign.ScatterBySlice,
    foreign_groups.FuseMatmul,
    foreign_groups.Bucket,
    foreign_groups.EraseUnread,
    foreign_local.FuseNorm,
    foreign_local.SplitNorm,
    foreign_local.SplitLayerNorm,
    foreign_local.MergeEqualCalls,
    foreign_local.DropCopies,
    foreign_local.ReuseOperand,
    foreign_local.NameRegions,
    foreign_local.Rebuild,
    foreign_local.SideStream,
    tiny.SplitMean,
)

#: Passes with a defect, by name.
MUTANTS: dict[str, type[Foreign]] = {
    found.name: found
    for module in _MODULES
    for found in vars(module).values()
    if isinstance(found, type) and found.__module__ == module.__name__ and found not in (Foreign, *SOUND)
}
