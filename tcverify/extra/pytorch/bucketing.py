"""`torch._inductor.fx_passes.bucketing`: collectives of one kind become one, over their operands put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tcverify.extra.pytorch.base import TorchPass


class BucketAllGather(TorchPass):
    """`bucket_all_gather`.

    Options:
        mode: how the bucket is filled.
        cap_mb: how large it may be.
    """

    name = "torch:bucket_all_gather"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor.fx_passes import bucketing

        bucketing.bucket_all_gather(gm, lambda _: options["cap_mb"], mode=options["mode"])


__all__ = ["BucketAllGather"]
