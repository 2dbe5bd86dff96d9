"""Passes that move nodes so that communication runs while something computes, and what they share."""

from tcverify.passes.overlap.configured import ReorderForComputeCommOverlap
from tcverify.passes.overlap.fsdp_order import EnforceCommOrderingForFsdp
from tcverify.passes.overlap.fsdp_params import RemoveFsdp2UnshardedParamGraphInputUsage
from tcverify.passes.overlap.fsdp_reinplace import ReinplaceFsdpAllGather
from tcverify.passes.overlap.graph import (
    CommGraph,
    Communication,
    Kind,
    comm_graph,
    is_gemm_like,
    is_valid_order,
    placed,
)
from tcverify.passes.overlap.iterative import IterativePass
from tcverify.passes.overlap.iterative_raising import ReorderCommunicationPreservingPeakMemory
from tcverify.passes.overlap.iterative_sinking import SinkWaitsIterative
from tcverify.passes.overlap.reordering import (
    DecideGlobalOrderingOfComms,
    OverlapPass,
    RaiseComms,
    ReorderComputeForOverlap,
    SinkWaits,
)
from tcverify.passes.overlap.runtimes import Runtimes, aligned, runtimes
from tcverify.passes.overlap.visualize import VisualizeOverlap, overlap_trace, visualize_overlap
from tcverify.registry.passes import OVERLAP_PASSES

__all__ = [
    "OVERLAP_PASSES",
    "CommGraph",
    "Communication",
    "DecideGlobalOrderingOfComms",
    "EnforceCommOrderingForFsdp",
    "IterativePass",
    "Kind",
    "OverlapPass",
    "RaiseComms",
    "ReinplaceFsdpAllGather",
    "RemoveFsdp2UnshardedParamGraphInputUsage",
    "ReorderCommunicationPreservingPeakMemory",
    "ReorderComputeForOverlap",
    "ReorderForComputeCommOverlap",
    "Runtimes",
    "SinkWaits",
    "SinkWaitsIterative",
    "VisualizeOverlap",
    "aligned",
    "comm_graph",
    "is_gemm_like",
    "is_valid_order",
    "overlap_trace",
    "placed",
    "runtimes",
    "visualize_overlap",
]
