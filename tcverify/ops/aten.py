"""Pure aten: ops run as they are, except those whose result is not a function of their arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tcverify.arithmetic import unwritten
from tcverify.ops.table import Op

#: Ops that make memory nobody has written: it holds what shows when it is read all the same.
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
#: Ops that read such memory.
_UNINITIALISED = frozenset({"resize_"})
#: Ops that reach for files or the terminal. Programs come from others, too.
_OUTSIDE = frozenset({"from_file", "save", "_print"})


def is_allocation(name: str) -> bool:
    """Whether the op of a qualified name makes memory that nobody has written."""
    return name.startswith("aten::") and name.removeprefix("aten::").split(".")[0] in _UNWRITTEN


def aten_op(name: str, target: Any) -> Op:
    """Return what the aten op `target` means."""
    if not isinstance(target, torch._ops.OpOverload):
        return Op(name, None, reason="an overload packet; graphs name overloads (torch.ops.aten.add.Tensor)")
    base = name.removeprefix("aten::").split(".")[0]
    if base in _UNINITIALISED:
        return Op(name, None, reason="its result is uninitialised memory")
    if base in _UNWRITTEN:
        return Op(name, partial(unwritten, target))
    if base in _OUTSIDE:
        return Op(name, None, reason="it reaches outside the program")
    tags = {tag.name for tag in target.tags}  # by name: the set of tags grows from one torch to the next
    if name == "aten::view.dtype":
        return Op(name, None, reason="it reads the bits of values, which number domains do not carry")
    if "nondeterministic_seeded" in tags:
        return Op(name, None, reason="its result is random")
    if tags & {"dynamic_output_shape", "data_dependent_output"}:
        return Op(name, None, reason="its shape depends on data")
    schema = target._schema
    aliases = any(a.alias_info is not None for a in schema.arguments) or any(
        r.alias_info is not None for r in schema.returns
    )
    return Op(name, target, aliases=aliases or "maybe_aliasing_or_mutating" in tags)
