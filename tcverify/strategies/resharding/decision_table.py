"""The decision table: which communication a set or a reduction needs, determined by its layouts alone."""

from __future__ import annotations

from tcverify.ops import Resharding


def row_of(made: Resharding) -> str:
    """What communication a set or a reduction takes, by the layouts; "grid-" stands before it where a mesh has several dims."""
    source, target = made.source, made.target
    same, before, after = source.mesh == target.mesh, source.is_sharded, target.is_sharded
    if max(source.mesh.ndim, target.mesh.ndim) > 1:
        return _grid_row(made) if same else "grid-moved"
    if made.dim is not None:
        if made.dim not in source.sharding:
            return "local-sum" if same else "unsharded-sum"
        if after:
            return "reduce-scatter" if same else "reduce-scatter-across"
        return "allreduce" if same else "reduce"
    if same:
        if source == target or not (before or after):
            return "local"
        return "all-to-all" if before and after else "allgather" if before else "chunk"
    if before and after:
        return "send-recv" if source.mesh.size == target.mesh.size else "unequal-send-recv"
    return "gather" if before else "scatter" if after else "broadcast"


def _grid_row(made: Resharding) -> str:
    """Of several mesh dims, as a rule one changes."""
    over = made.source.mesh_dim(made.dim) if made.dim is not None else None
    if made.dim is not None and over is None:
        return "grid-local-sum"
    counted = [None if s == made.dim else s for s in made.source.sharding]
    if made.dim is not None:
        counted = [s if s is None or s < made.dim else s - 1 for s in counted]
    changed = [(b, a) for b, a in zip(counted, made.target.sharding, strict=True) if b != a]
    if over is not None:
        if len(changed) > 1 or (changed and made.target.sharding[over] is None):
            return "grid-several"
        return "grid-reduce-scatter" if changed else "grid-allreduce"
    if len(changed) != 1:
        return "grid-several" if changed else "grid-local"
    ((before, after),) = changed
    return "grid-all-to-all" if None not in (before, after) else "grid-chunk" if before is None else "grid-allgather"


__all__ = ["row_of"]
