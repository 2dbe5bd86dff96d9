"""A library of ops that have signatures and shapes, and kernels that must never run."""

from __future__ import annotations

from typing import Any

import torch

from tcverify.ops.definitions import lasting_library


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("the kernel of an op without a meaning ran")


def _like(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _top(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape[0], k), x.new_empty((x.shape[0], k), dtype=torch.int64)


SCHEMAS: dict[str, tuple[str, Any]] = {
    "rope": ("(Tensor x, Tensor cos, Tensor sin) -> Tensor", _like),
    "act": ("(Tensor x, float scale=1.0) -> Tensor", _like),
    "top": ("(Tensor x, int k) -> (Tensor, Tensor)", _top),
    "store": ("(Tensor kv, Tensor(a!) cache, Tensor slots) -> ()", lambda *_: None),
    "turned": ("(Tensor x) -> Tensor", lambda x: torch.empty_like(x.t())),
    "reduce": ("(Tensor x, str group_name) -> Tensor", _like),
    "exchange": ("(Tensor x, int rank, int[] rank_group) -> Tensor", _like),
    "send": ("(Tensor x, int peer) -> Tensor", _like),
    "view": ("(Tensor(a) x) -> Tensor(a)", lambda x: x.view(-1)),
    "log": ("(Tensor x) -> ()", lambda x: None),
    "shapeless": ("(Tensor x) -> Tensor", None),
}


def define() -> None:
    """Define them, once per process, under whatever name this module is imported."""
    if hasattr(torch.ops.tcverify_library, "rope"):
        return
    library = lasting_library("tcverify_library")
    for name, (schema, fake) in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, _never, "CPU")
        if fake is not None:
            library.impl(name, fake, "Meta")


define()
