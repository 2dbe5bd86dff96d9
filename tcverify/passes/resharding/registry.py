"""The passes that lower programs whose tensors carry layouts, by name."""

from __future__ import annotations

from collections.abc import Callable

from tcverify.passes.base import Pass
from tcverify.passes.resharding.contiguous import MakeReshardingContiguous
from tcverify.passes.resharding.deallocation import InsertDeallocations
from tcverify.passes.resharding.host_program import HostProgram
from tcverify.passes.resharding.lowering import ConvertOpToCommunication
from tcverify.passes.resharding.pipelined import PipelinedMatmul
from tcverify.passes.resharding.stream_loops import StreamParallelType

#: What makes each of them; options are keyword arguments. The last one runs the others, one after the other.
RESHARDING_PASSES: dict[str, Callable[..., Pass]] = {
    made.name: made
    for made in (
        PipelinedMatmul,
        StreamParallelType,
        MakeReshardingContiguous,
        ConvertOpToCommunication,
        InsertDeallocations,
        HostProgram,
    )
}

__all__ = ["RESHARDING_PASSES"]
