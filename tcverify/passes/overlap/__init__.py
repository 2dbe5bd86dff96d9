"""Passes that move nodes so that communication overlaps with compute, and their common parts."""

from tcverify.passes.overlap.configured import ReorderForComputeCommOverlap
from tcverify.passes.overlap.fsdp_order import EnforceCommOrderingForFsdp
from tcverify.passes.overlap.fsdp_params import RemoveFsdp2UnshardedParamGraphInputUsage
from tcverify.passes.overlap.fsdp_reinplace import ReinplaceFsdpAllGather
from tcverify.passes.overlap.graph import (
    AsyncCommunication,
    CommGraph,
    Kind,
    comm_graph,
    is_gemm_like,
    is_valid_order,
    put_in_order,
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
from tcverify.passes.overlap.runtimes import Runtimes, align_runtimes, runtimes
from tcverify.passes.overlap.visualize import VisualizeOverlap, overlap_trace, visualize_overlap
from tcverify.registry.passes import OVERLAP_PASSES

__all__ = [
    "OVERLAP_PASSES",
    "AsyncCommunication",
    "CommGraph",
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
    "align_runtimes",
    "comm_graph",
    "is_gemm_like",
    "is_valid_order",
    "overlap_trace",
    "put_in_order",
    "runtimes",
    "visualize_overlap",
]
