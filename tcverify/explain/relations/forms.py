"""The forms that a value of the original may take in the rewritten program: whole, a shard of it, gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tcverify.explain.relations.grouping import Grouping
from tcverify.explain.relations.layouts import RelationContext, sizes_along, slice_part
from tcverify.explain.relations.tensors import Values, concatenate_or_none, view_or_none

#: Number of forms that are examined.
MAX_FORMS = 6


@dataclass(frozen=True, slots=True)
class Form:
    """A form of an original value, on every rank.

    Attributes:
        text: "the original's 'add'", "a shard of the original's 'add' along dim 0 over tp [0, 1]".
        expected: the original's value in this form, by rank.
        local: brings any value of the original's shape that a rank could hold into this rank's form.
        dim, grouping: of the shard.
        sizes: of the shards of this rank's group.
    """

    text: str
    expected: Values
    local: Callable[[torch.Tensor, int], torch.Tensor | None]
    dim: int | None = None
    grouping: Grouping | None = None
    sizes: Callable[[int], list[int]] | None = None


def forms(new: Values, old: Values, name: str, setting: RelationContext) -> Iterator[Form]:
    """The forms of one node's values in which they have the sizes of another's, the simplest first; at most `MAX_FORMS`."""
    found = 0
    for form in _forms(new, old, name, setting):
        if form is not None:
            yield form
            found += 1
            if found == MAX_FORMS:
                return


def _forms(new: Values, old: Values, name: str, setting: RelationContext) -> Iterator[Form | None]:
    yield _form(new, old, f"the original's '{name}'", lambda value, rank: view_or_none(value, new[rank].shape))
    for grouping in setting.groupings:
        if not (grouping.groups.keys() >= new.keys() and grouping.groups.keys() <= old.keys()):
            continue
        for dim in range(next(iter(new.values())).dim()):
            yield _shard(new, old, name, grouping, dim)
        for dim in range(next(iter(old.values())).dim()):

            def gather(
                value: torch.Tensor, rank: int, along: int = dim, over: Grouping = grouping
            ) -> torch.Tensor | None:
                whole = concatenate_or_none([value if m == rank else old[m] for m in over.groups[rank]], along)
                return None if whole is None else view_or_none(whole, new[rank].shape)

            yield _form(new, old, f"the original's '{name}' gathered along dim {dim} {grouping.where}", gather)


def _form(
    new: Values, old: Values, text: str, local: Callable[[torch.Tensor, int], torch.Tensor | None]
) -> Form | None:
    expected: dict[int, torch.Tensor] = {}
    for rank in new:
        made = local(old[rank], rank)
        if made is None:
            return None
        expected[rank] = made
    return Form(text, expected, local)


def _shard(new: Values, old: Values, name: str, grouping: Grouping, dim: int) -> Form | None:
    def sizes(rank: int) -> list[int]:
        return sizes_along(new, old, dim, rank, grouping)

    def cut(value: torch.Tensor, rank: int) -> torch.Tensor | None:
        return slice_part(value, new[rank].shape, dim, sizes(rank), grouping.position(rank))

    made = _form(new, old, f"a shard of the original's '{name}' along dim {dim} {grouping.where}", cut)
    if made is None or any(made.expected[r].shape != new[r].shape for r in new):
        return None
    return Form(made.text, made.expected, cut, dim, grouping, sizes)
