"""The passes that may be named in a list of passes, by name."""

from __future__ import annotations

from collections.abc import Callable

from tcverify.passes.base import Pass
from tcverify.passes.overlap.fsdp_order import EnforceCommOrderingForFsdp
from tcverify.passes.overlap.fsdp_params import RemoveFsdp2UnshardedParamGraphInputUsage
from tcverify.passes.overlap.fsdp_reinplace import ReinplaceFsdpAllGather
from tcverify.passes.overlap.iterative_raising import ReorderCommunicationPreservingPeakMemory
from tcverify.passes.overlap.iterative_sinking import SinkWaitsIterative
from tcverify.passes.overlap.reordering import (
    DecideGlobalOrderingOfComms,
    RaiseComms,
    ReorderComputeForOverlap,
    SinkWaits,
)
from tcverify.passes.overlap.visualize import VisualizeOverlap

#: What makes each pass; options are keyword arguments.
OVERLAP_PASSES: dict[str, Callable[..., Pass]] = {
    "sink_waits": SinkWaits,
    "raise_comms": RaiseComms,
    "reorder_compute_for_overlap": ReorderComputeForOverlap,
    "reorder_communication_preserving_peak_memory": ReorderCommunicationPreservingPeakMemory,
    "sink_waits_iterative": SinkWaitsIterative,
    "decide_global_ordering_of_comms": DecideGlobalOrderingOfComms,
    "visualize_overlap": VisualizeOverlap,
    "enforce_comm_ordering_for_fsdp": EnforceCommOrderingForFsdp,
    "remove_fsdp2_unsharded_param_graph_input_usage": RemoveFsdp2UnshardedParamGraphInputUsage,
    "reinplace_fsdp_all_gather": ReinplaceFsdpAllGather,
}

__all__ = ["OVERLAP_PASSES"]
