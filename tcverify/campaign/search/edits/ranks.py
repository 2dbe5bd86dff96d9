"""Edits that one rank makes alone: what a pass decides on one rank may be another thing than what its peers decide."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from tcverify.campaign.search.edits.site import Edit, Site
from tcverify.campaign.search.edits.values import change_operand, move_step, return_less, return_more
from tcverify.shrink.graph.sketch import Sketch


def make_rank_differ(site: Site) -> Iterator[Edit]:
    """Let the first rank or the last return another choice of values, read another value, or run a step at another time.

    That is for passes which are given ranks that differ: others may take it for granted that all do the same.
    """
    sketch = site.facts.sketch
    if not site.apart or len(sketch.graphs) > 1 or any(sketch.modules) or sketch.mesh.world_size < 2:
        return
    for edit in itertools.chain(return_less(site), return_more(site), move_step(site), change_operand(site)):
        yield from (Edit(partial(_alone, sketch, edit, rank), edit.at) for rank in (0, sketch.mesh.world_size - 1))


def _alone(sketch: Sketch, edit: Edit, rank: int) -> Sketch | None:
    made = edit.make()
    if made is None or made.inputs != sketch.inputs:
        return None
    ranks = (replace(one, graph=1) if number == rank else one for number, one in enumerate(sketch.ranks))
    return replace(sketch, graphs=(*sketch.graphs, *made.graphs), ranks=tuple(ranks))


__all__ = ["make_rank_differ"]
