"""Ops that write, as compilers see them: wrapped, so that nothing is written; the written values are returned instead.

AOTAutograd has `auto_functionalized(op, …)` in the place of a custom op that writes into its operands. It copies these, calls the
op on the copies, and returns what the op returns, and the copies. torch says how; what the op computes is as everywhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tcverify.errors import UnsupportedOp
from tcverify.ops.op import Lookup, Op


def wrapper(name: str, target: torch._ops.HigherOrderOperator, lookup: Lookup) -> Op:
    """The meaning of the wrapper of this qualified name.

    Args:
        lookup: returns the meaning of the wrapped op.
    """
    run, native = (partial(_call, lookup, target._name, native) for native in (False, True))
    return Op(name, run, native=native, uninterpreted=True)


def _call(lookup: Lookup, name: str, native: bool, /, op: torch._ops.OpOverload, **kwargs: Any) -> Any:
    from torch._higher_order_ops import auto_functionalize

    found = lookup(op)
    run = (found.native if native else None) or found.require()
    if found.collective:
        raise UnsupportedOp(found.name, f"{name} calls it, a collective that writes")
    with _Meaning(op, run):
        return getattr(auto_functionalize, f"{name}_dense")(op, **kwargs)


class _Meaning(TorchDispatchMode):
    """Calls what an op means in the place of the op."""

    def __init__(self, op: torch._ops.OpOverload, run: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._op, self._run = op, run

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Of torch: whether to wrap the mode for torch.compile, whose import takes seconds. Programs here are not compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._run if func is self._op else func)(*args, **(kwargs or {}))


__all__ = ["wrapper"]
