"""Defines ops in torch, so that graphs can call them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tcverify.ops.op import Op

#: torch forgets an op with the library that defines it.
_KEPT: list[torch.library.Library] = []


def lasting_library(namespace: str) -> torch.library.Library:
    """Return a library that adds to a namespace; what it registers lasts as long as the process."""
    library = torch.library.Library(namespace, "FRAGMENT")
    _KEPT.append(library)
    return library


def define(namespace: str, ops: Iterable[Op]) -> torch.library.Library:
    """Define ops with an effect: with shapes for fake tensors, and without kernels, since the tables say what they do.

    torch chooses a kernel by the tensors among the arguments. Of an op that takes none, nothing but the signature is registered.
    """
    library = lasting_library(namespace)
    for op in ops:
        name = op.name.removeprefix(f"{namespace}::")
        library.define(name + op.signature)
        if op.fake is not None and "Tensor" in op.signature.partition("->")[0]:
            library.impl(name, op.fake, "Meta")
        torch.fx.node.has_side_effect(getattr(getattr(torch.ops, namespace), name).default)
    return library


__all__ = ["define", "lasting_library"]
