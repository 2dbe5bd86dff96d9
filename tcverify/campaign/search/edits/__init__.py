"""Typed edits: every program that is one small change away from a program, by families."""

from tcverify.campaign.search.edits.added import change_op, insert_call_on_edge, read_value_again, replace_input_by_call
from tcverify.campaign.search.edits.forms import (
    change_argument_forms,
    change_dtypes,
    change_groups,
    change_int_lists,
    change_integer_values,
    change_numbers,
    change_pass_options,
    change_placements,
    change_shapes,
    change_texts,
    give_default,
)
from tcverify.campaign.search.edits.joined import feed_into_kernel, nest_kernel, recompute_value
from tcverify.campaign.search.edits.ranks import make_rank_differ
from tcverify.campaign.search.edits.site import Edit, Family, Site
from tcverify.campaign.search.edits.values import (
    change_operand,
    change_selected_result,
    move_step,
    repeat_step,
    return_less,
    return_more,
    swap_operands,
    write_into_value,
)
from tcverify.campaign.search.edits.views import change_layout, insert_view

#: Families of edits by what they do.
FAMILIES: dict[str, Family] = {
    "return a value": return_more,
    "return less": return_less,
    "read a value": read_value_again,
    "take another operand": change_operand,
    "swap operands": swap_operands,
    "put a call on an edge": insert_call_on_edge,
    "view a value": insert_view,
    "lay a value out otherwise": change_layout,
    "make a value": replace_input_by_call,
    "replace an op": change_op,
    "feed another kernel": feed_into_kernel,
    "put a kernel within": nest_kernel,
    "repeat a step": repeat_step,
    "make a value again": recompute_value,
    "select another result": change_selected_result,
    "write in place": write_into_value,
    "move a step": move_step,
    "change a number": change_numbers,
    "change a text": change_texts,
    "change a list": change_int_lists,
    "give a default another value": give_default,
    "write an argument otherwise": change_argument_forms,
    "change a group": change_groups,
    "change a shape": change_shapes,
    "change a placement": change_placements,
    "change a dtype": change_dtypes,
    "change values": change_integer_values,
    "change an option": change_pass_options,
    "let a rank differ": make_rank_differ,
}

__all__ = ["FAMILIES", "Edit", "Family", "Site"]
