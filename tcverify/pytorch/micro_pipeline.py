"""`torch._inductor.fx_passes.micro_pipeline_tp`: products behind all_gathers and before reduce_scatters become fused ops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import fx

from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.end_to_end.pipeline import EAGER_KERNELS, SORT, Pipeline, imported
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

        require_functional(gm.graph)
        with torch_metadata(gm), inductor_config(options), symmetric_memory():
            micro_pipeline_tp.micro_pipeline_tp_pass(gm.graph)
            stable_topological_sort(gm.graph)

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return with_symmetric_memory(
            Pipeline(
                settings={"_micro_pipeline_tp": True, **options, **EAGER_KERNELS},
                call=(
                    imported("torch._inductor.fx_passes.micro_pipeline_tp", "micro_pipeline_tp_pass"),
                    "micro_pipeline_tp_pass(gm.graph)",
                    *SORT,
                ),
            )
        )


_SYMMETRIC = """\
from unittest import mock

import torch.distributed._symmetric_memory as symmetric_memory

# The fused ops have kernels for CUDA alone. In torch's test mode these call other ops, which run anywhere.
FUSED = torch.library.Library("symm_mem", "IMPL")
for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
    FUSED.impl(name, getattr(symmetric_memory, f"_{name}"), "CPU")"""


def with_symmetric_memory(pipeline: Pipeline) -> Pipeline:
    """The pipeline with what `symmetric_memory` lets passes believe."""
    return replace(
        pipeline,
        definitions=(_SYMMETRIC,),
        given=("symmetric_memory._test_mode()", "mock.patch.object(dist, 'is_nccl_available', return_value=True)"),
        standing_in="symmetric memory and NCCL that are said to be there",
    )


__all__ = ["MicroPipelineTp", "symmetric_memory", "with_symmetric_memory"]
