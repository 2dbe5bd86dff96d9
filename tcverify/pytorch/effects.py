"""Registers the opaque communication of programs with PyTorch, as users register ops with side effects.

An op of the `p2p` dialect that is "declared" is in the registry of torch.fx: dead code elimination keeps it. One that is
"ordered" has an effect in the sense of `torch._higher_order_ops.effects`: compilers thread a token through all of them, so that
they keep their number and their order. Ops that write into an operand say so in their signature, and cannot be ordered.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from tcverify.ops import resolve
from tcverify.ops.definitions import lasting_library

#: Kinds of registration, as the option `effects` of subjects names them.
KINDS = ("declared", "ordered")

#: Of the dialect, those that write into no operand.
_OPS = ("p2p::send", "p2p::recv", "p2p::barrier")


@contextlib.contextmanager
def effects_as(kind: str) -> Iterator[None]:
    """Let PyTorch know the opaque ops of programs as one of `KINDS` meanwhile."""
    targets = [resolve(name) for name in _OPS]
    if kind != "ordered":
        yield
        return
    with contextlib.ExitStack() as stack:
        for target in targets:
            stack.callback(_ordered(target))
        yield


def _ordered(target: Any) -> Any:
    """Register an op as one with an ordered effect; return what takes that back."""
    from torch._higher_order_ops import effects

    made: Any = effects._register_effectful_op(target, effects._EffectType.ORDERED)
    if made is not None:  # since 2.10: a handle
        return made.destroy
    forget: Any = effects._deregister_effectful_op  # type: ignore[attr-defined]
    return lambda: forget(target)


@functools.cache
def define_shapes() -> None:
    """Give the op that has no operand a shape for fake tensors, which compilers ask for."""
    resolve("p2p::barrier")
    torch.library.register_fake("p2p::barrier", lambda group_name: None, lib=lasting_library("p2p"))


__all__ = ["KINDS", "define_shapes", "effects_as"]
