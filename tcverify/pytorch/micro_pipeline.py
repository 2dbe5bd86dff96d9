"""`torch._inductor.fx_passes.micro_pipeline_tp`: products behind all_gathers and before reduce_scatters become fused ops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import fx

from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.functional_graphs import inductor_config, require_functional, torch_metadata


@contextlib.contextmanager
def symmetric_memory(enabled: bool = True) -> Iterator[None]:
    """Let passes believe that every group has symmetric memory, as torch's own tests do, and that NCCL is there."""
    if not enabled:
        yield
        return
    from torch.distributed._symmetric_memory import _test_mode

    with _test_mode(), mock.patch.object(dist, "is_nccl_available", return_value=True):
        yield


class MicroPipelineTp(TorchPass):
    """`micro_pipeline_tp_pass`, with the sort by dependencies that follows it in `post_grad_passes`.

    Options:
        reorder_for_compute_comm_overlap: of `torch._inductor.config`: what overlaps as it is is left alone.
    """

    name = "torch:micro_pipeline_tp"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        from torch._inductor.fx_passes import micro_pipeline_tp
        from torch._inductor.pattern_matcher import stable_topological_sort

        require_functional(gm)
        with torch_metadata(gm), inductor_config(options), symmetric_memory():
            micro_pipeline_tp.micro_pipeline_tp_pass(gm.graph)
            stable_topological_sort(gm.graph)


__all__ = ["MicroPipelineTp", "symmetric_memory"]
