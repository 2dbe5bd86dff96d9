"""The passes that ship with tcverify, by name, and what names mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tcverify.registry.pipelines import split_stages
from tcverify.registry.references import find
from tcverify.registry.registry import Registry

#: What names of PyTorch's own passes start with.
PREFIX = "torch:"

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

#: Factories of the passes that a list of passes may name; options are keyword arguments.
OVERLAP_PASSES: Registry[Callable[..., Any]] = Registry(_OVERLAP)

#: Factories of the passes that lower programs whose tensors have layouts. The last one runs the others in sequence.
RESHARDING_PASSES: Registry[Callable[..., Any]] = Registry(_RESHARDING)

#: Factory of each built-in pass; options are keyword arguments.
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

#: A one-line description of each.
DESCRIPTIONS: Mapping[str, str] = {
    "sequence_parallel": "computes residual sums and norms after an all_reduce only on this rank's tokens (patterns P1, P2, P3)",
    "multistream": "runs collectives on separate streams, in parallel with compute, if that is faster than sequential execution",
    "sink_waits": "moves waits for asynchronous collectives as late as possible",
    "raise_comms": "starts asynchronous collectives as early as possible",
    "reorder_compute_for_overlap": "moves enough independent compute after every start to cover its communication",
    "reorder_communication_preserving_peak_memory": "moves starts up, within a memory budget, if that hides more communication",
    "sink_waits_iterative": "moves waits down, within a memory budget, if that hides more communication",
    "decide_global_ordering_of_comms": "declares the order of all communication, for later passes",
    "visualize_overlap": "shows what runs while communication is in flight; changes nothing",
    "enforce_comm_ordering_for_fsdp": "starts FSDP's next all_gather or reduce_scatter only after the previous one",
    "remove_fsdp2_unsharded_param_graph_input_usage": "replaces FSDP's unsharded parameters with the values copied into them",
    "reinplace_fsdp_all_gather": "lets FSDP's all_gathers write into the buffer that the shards were copied into",
    "reorder_for_compute_comm_overlap": "runs a list of the passes that move communication and compute",
    "comm_buffers": "places operands of collectives at fixed offsets in registered buffers, and selects the all_reduce for them",
    "pipelined_matmul": "overlaps matmuls with the communication of their operands or results, in chunks on streams",
    "stream_parallel_type": "computes ops whose results have a stream axis in parts, on alternating streams",
    "make_resharding_contiguous": "moves dims that are sharded or gathered to the front, and back",
    "convert_op_to_communication": "lowers changes of layout to communications and waits",
    "insert_deallocations": "frees every value once, as soon as it is no longer needed",
    "resharding": "lowers programs with layouts to host programs, by these five passes in sequence",
    "identity": "changes nothing; must never be refuted",
}

#: The strategy whose programs a pass changes, if that is not the default one.
SUITED: Mapping[str, str] = {
    name: "fsdp" if "fsdp" in name else "functional"
    for name in (*OVERLAP_PASSES, "reorder_for_compute_comm_overlap", "comm_buffers")
} | dict.fromkeys(RESHARDING_PASSES, "resharding")

#: What is verified when no pass is named: every pass, and the pipelines that compilers run.
DEFAULT: tuple[str, ...] = (
    *BUILTIN,
    "sequence_parallel+multistream",
    "comm_buffers+reorder_for_compute_comm_overlap",
)


def stage_names(text: str) -> list[str]:
    """Split "first+second" into its stages: built-in names, names of PyTorch's passes, and references.

    Raises:
        PassLoadError: a stage is empty.
    """
    return split_stages(text, lambda piece: piece in BUILTIN or ":" in piece)


def reference_of(name: str) -> str:
    """Return the reference of a built-in pass, or of one of PyTorch's passes. Anything else stays as it is.

    Raises:
        UsageError: this torch has no such pass.
    """
    if name.startswith(PREFIX):
        subject, _ = find("tcverify.pytorch:subject")
        return str(subject(name).target)
    return BUILTIN.references.get(name, name)


__all__ = [
    "BUILTIN", "DEFAULT", "DESCRIPTIONS", "OVERLAP_PASSES", "PREFIX", "RESHARDING_PASSES", "SUITED", "reference_of",
    "stage_names",
]  # fmt: skip
