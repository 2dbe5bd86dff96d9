"""Runs callables that no table knows so that the dialects' ops inside them mean what they mean everywhere else.

A submodule or a function of the user may call ops of a library whose kernels compute shapes only: running it as it is would
compare uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tcverify.errors import UnsupportedOp
from tcverify.ops.table import in_dialect, lookup


class _ByMeaning(TorchFunctionMode):
    """Carries out calls of the dialects' ops by what the tables say."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) or not in_dialect(func):
            return func(*args, **given)
        op = lookup(func)
        if op.collective:
            raise UnsupportedOp(op.name, "a collective inside a submodule or a function that the graph calls")
        return op.require()(*args, **given)


def run_by_meaning(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the calls of dialect ops in it carried out by their meaning.

    The result raises `UnsupportedOp` when the function calls a collective, or an op of a dialect that has no meaning.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with _ByMeaning():
            return function(*args, **kwargs)

    return run


__all__ = ["run_by_meaning"]
