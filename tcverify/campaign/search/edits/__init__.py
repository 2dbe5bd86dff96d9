"""Typed edits: every program that is one small change away from a program, by families."""

from tcverify.campaign.search.edits.added import other_op, produced, put_on_edge, read_again
from tcverify.campaign.search.edits.forms import (
    other_dtypes,
    other_groups,
    other_lists,
    other_numbers,
    other_options,
    other_placements,
    other_shapes,
    other_values,
)
from tcverify.campaign.search.edits.joined import fed, recomputed, within
from tcverify.campaign.search.edits.ranks import apart
from tcverify.campaign.search.edits.site import Edit, Family, Site
from tcverify.campaign.search.edits.values import (
    moved,
    other_operand,
    other_result,
    repeated,
    returned,
    returned_less,
    swapped,
    written,
)
from tcverify.campaign.search.edits.views import viewed

#: Families of edits by what they do.
FAMILIES: dict[str, Family] = {
    "return a value": returned,
    "return less": returned_less,
    "read a value": read_again,
    "take another operand": other_operand,
    "swap operands": swapped,
    "put a call on an edge": put_on_edge,
    "view a value": viewed,
    "make a value": produced,
    "replace an op": other_op,
    "feed another kernel": fed,
    "put a kernel within": within,
    "repeat a step": repeated,
    "make a value again": recomputed,
    "select another result": other_result,
    "write in place": written,
    "move a step": moved,
    "change a number": other_numbers,
    "change a list": other_lists,
    "change a group": other_groups,
    "change a shape": other_shapes,
    "change a placement": other_placements,
    "change a dtype": other_dtypes,
    "change values": other_values,
    "change an option": other_options,
    "let a rank differ": apart,
}

__all__ = ["FAMILIES", "Edit", "Family", "Site"]
