"""The passes that ship with tcverify, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tcverify.registry.registry import Registry

_OVERLAP = {
    "sink_waits": "tcverify.passes.overlap.reordering:SinkWaits",
    "raise_comms": "tcverify.passes.overlap.reordering:RaiseComms",
    "reorder_compute_for_overlap": "tcverify.passes.overlap.reordering:ReorderComputeForOverlap",
    "reorder_communication_preserving_peak_memory":
        "tcverify.passes.overlap.iterative_raising:ReorderCommunicationPreservingPeakMemory",
    "sink_waits_iterative": "tcverify.passes.overlap.iterative_sinking:SinkWaitsIterative",
    "decide_global_ordering_of_comms": "tcverify.passes.overlap.reordering:DecideGlobalOrderingOfComms",
    "visualize_overlap": "tcverify.passes.overlap.visualize:VisualizeOverlap",
    "enforce_comm_ordering_for_fsdp": "tcverify.passes.overlap.fsdp_order:EnforceCommOrderingForFsdp",
    "remove_fsdp2_unsharded_param_graph_input_usage":
        "tcverify.passes.overlap.fsdp_params:RemoveFsdp2UnshardedParamGraphInputUsage",
    "reinplace_fsdp_all_gather": "tcverify.passes.overlap.fsdp_reinplace:ReinplaceFsdpAllGather",
}  # fmt: skip

_RESHARDING = {
    "pipelined_matmul": "tcverify.passes.resharding.pipelined.pipelined:PipelinedMatmul",
    "stream_parallel_type": "tcverify.passes.resharding.stream_loops:StreamParallelType",
    "make_resharding_contiguous": "tcverify.passes.resharding.contiguous:MakeReshardingContiguous",
    "convert_op_to_communication": "tcverify.passes.resharding.lowering:ConvertOpToCommunication",
    "insert_deallocations": "tcverify.passes.resharding.deallocation:InsertDeallocations",
    "resharding": "tcverify.passes.resharding.host_program:HostProgram",
}

#: What makes the passes that may be named in a list of passes; options are keyword arguments.
OVERLAP_PASSES: Registry[Callable[..., Any]] = Registry(_OVERLAP)

#: What makes the passes that lower programs whose tensors carry layouts. The last one runs the others, one after the other.
RESHARDING_PASSES: Registry[Callable[..., Any]] = Registry(_RESHARDING)

#: What makes each built-in pass; options are keyword arguments.
BUILTIN: Registry[Callable[..., Any]] = Registry(
    {
        "sequence_parallel": "tcverify.passes.sequence_parallel.sequence_parallel:SequenceParallel",
        "multistream": "tcverify.passes.multistream.multistream:Multistream",
        **_OVERLAP,
        "reorder_for_compute_comm_overlap": "tcverify.passes.overlap.configured:ReorderForComputeCommOverlap",
        "comm_buffers": "tcverify.passes.comm_buffers.comm_buffers:CommBuffers",
        **_RESHARDING,
        "identity": "tcverify.passes.identity:Identity",
    }
)

#: One line on each.
DESCRIPTIONS: Mapping[str, str] = {
    "sequence_parallel": "residual sums and norms behind an all_reduce work on this rank's tokens (patterns P1, P2, P3)",
    "multistream": "collectives run beside compute on streams of their own, where that beats one op after the other",
    "sink_waits": "waits for asynchronous collectives stand as late as possible",
    "raise_comms": "asynchronous collectives start as early as possible",
    "reorder_compute_for_overlap": "every start is followed by independent compute for as long as its communication takes",
    "reorder_communication_preserving_peak_memory": "starts move up, within a budget of memory and where that hides more",
    "sink_waits_iterative": "waits move down, within a budget of memory and where that hides more",
    "decide_global_ordering_of_comms": "declares the order of all communication, for the passes that come after it",
    "visualize_overlap": "shows what runs while communication is under way, and changes nothing",
    "enforce_comm_ordering_for_fsdp": "FSDP's next all_gather or reduce_scatter begins only when the last one is over",
    "remove_fsdp2_unsharded_param_graph_input_usage": "what is copied into FSDP's unsharded parameters is used in their place",
    "reinplace_fsdp_all_gather": "FSDP's all_gathers write into the buffer that the shards were copied into",
    "reorder_for_compute_comm_overlap": "runs a list of the passes that move communication and compute, one after the other",
    "comm_buffers": "operands of collectives live in registered buffers at fixed places, and all_reduces take the form for it",
    "pipelined_matmul": "matmuls and the communication of their operands or results overlap, chunk by chunk, on streams",
    "stream_parallel_type": "ops whose results have a stream axis are computed part by part, on streams in turn",
    "make_resharding_contiguous": "dims that gain or lose a shard are brought to the front, and back",
    "convert_op_to_communication": "what brings tensors from layout to layout becomes communications and waits",
    "insert_deallocations": "what a graph makes is freed once, as soon as nobody needs it",
    "resharding": "programs whose tensors carry layouts become host programs, by these five passes one after the other",
    "identity": "changes nothing: what must never be refuted",
}

#: Which strategy draws programs that give a pass something to do, where that is not the default one.
SUITED: Mapping[str, str] = {
    name: "fsdp" if "fsdp" in name else "functional"
    for name in (*OVERLAP_PASSES, "reorder_for_compute_comm_overlap", "comm_buffers")
} | dict.fromkeys(RESHARDING_PASSES, "resharding")

#: What is verified when no pass is named: each pass, and what compilers run one after the other.
DEFAULT: tuple[str, ...] = (
    *BUILTIN,
    "sequence_parallel+multistream",
    "comm_buffers+reorder_for_compute_comm_overlap",
)

__all__ = ["BUILTIN", "DEFAULT", "DESCRIPTIONS", "OVERLAP_PASSES", "RESHARDING_PASSES", "SUITED"]
