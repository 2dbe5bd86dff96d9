"""Passes of `torch._inductor.comms` on FX graphs of FSDP2; torch dropped them with its tracing of FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tcverify.extra.pytorch.base import TorchPass


class ReinplaceFsdpAllGather(TorchPass):
    """`reinplace_fsdp_all_gather`."""

    name = "torch:reinplace_fsdp_all_gather"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor import comms

        comms.reinplace_fsdp_all_gather(gm.graph)  # type: ignore[attr-defined, unused-ignore]


__all__ = ["ReinplaceFsdpAllGather"]
