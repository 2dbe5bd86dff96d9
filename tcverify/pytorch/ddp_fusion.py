"""`torch._inductor.fx_passes.ddp_fusion`: all_reduces of gradients become few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.end_to_end.pipeline import EAGER_KERNELS, SORT, Pipeline, imported
from tcverify.pytorch.functional_graphs import name_overloads, require_functional, torch_metadata


class FuseDdp(TorchPass):
    """`fuse_ddp_communication`, with the sort by dependencies that follows it in `post_grad_passes`.

    Options:
        passes: what it runs, in order; the first is the default of `torch._inductor.config`.
        bucket_size_mb: how large a bucket may be.
    """

    name = "torch:ddp_fusion"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor.fx_passes import ddp_fusion
        from torch._inductor.pattern_matcher import stable_topological_sort

        require_functional(gm.graph)
        with torch_metadata(gm):
            passes = [*options["passes"].split("+")]
            ddp_fusion.fuse_ddp_communication(gm.graph, passes, options["bucket_size_mb"])
            stable_topological_sort(gm.graph)
            name_overloads(gm)

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        passes, size = options["passes"].split("+"), options["bucket_size_mb"]
        return Pipeline(
            settings={
                "_fuse_ddp_communication": True,
                "_fuse_ddp_communication_passes": passes,
                "_fuse_ddp_bucket_size": size,
                **EAGER_KERNELS,
            },
            call=(
                imported("torch._inductor.fx_passes.ddp_fusion", "fuse_ddp_communication"),
                f"fuse_ddp_communication(gm.graph, {passes!r}, {size!r})",
                *SORT,
            ),
        )


__all__ = ["FuseDdp"]
