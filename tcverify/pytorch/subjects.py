"""What of PyTorch can be verified by name, and in which of its versions that exists. Data; importing it imports no torch.

What the installed torch has is read from its sources: importing it takes a second, and Inductor several.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tcverify.errors import UsageError
from tcverify.registry.passes import PREFIX


@dataclass(frozen=True, slots=True)
class TorchSubject:
    """A part of PyTorch that can be verified as a pass.

    Attributes:
        name: as the command line takes it, behind the prefix.
        target: the class that applies it, as module:attribute.
        what: one line on it.
        source: where PyTorch defines it, as module:name.
        since: the first version of torch that has it, of those that tcverify supports.
        until: the last one; None where the newest has it.
        strategy: which programs give it something to do; names of several are joined by commas.
        draws: values of its options, by name, the default first.
        needs: what torch has to define for other values of an option than the default, as module:name, by option.
    """

    name: str
    target: str
    what: str
    source: str
    since: str = "2.9"
    until: str | None = None
    strategy: str = "functional"
    draws: Mapping[str, Sequence[Any]] = field(default_factory=lambda: MappingProxyType({}))
    needs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def versions(self) -> str:
        """The versions of torch that have it, in words."""
        return f"torch {self.since} and later" if self.until is None else f"torch {self.since} to {self.until}"

    def exists_in(self, version: str) -> bool:
        """Whether a version of torch is to have it, going by `since` and `until`."""
        number = release(version)
        return release(self.since) <= number and (self.until is None or number <= release(self.until))

    @property
    def here(self) -> bool:
        """Whether this torch has it, and what it takes to verify it."""
        module, _, name = self.source.partition(":")
        return name in _defined(module) and self.exists_in(importlib.metadata.version("torch"))

    def lacks(self, option: str) -> str:
        """What this torch lacks for values of an option other than the default, as module:name; empty if nothing."""
        needed = self.needs.get(option, "")
        module, _, name = needed.partition(":")
        return needed if needed and f" def {name}(" not in _source(module) else ""


def release(version: str) -> tuple[int, int]:
    """Return what counts of a version of torch: its first two numbers."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


#: A function, a class or a variable of a module, at the beginning of its line.
_DEFINITION = re.compile(r"^(?:def|class) +(\w+)|^(\w+) *=(?!=)", re.MULTILINE)


def installed_version() -> str:
    """Return the version of the torch that is installed, as `torch.__version__` says it."""
    found = re.search(r"^__version__ = '([^']+)'", _source("torch.version"), re.MULTILINE)
    return found[1] if found is not None else str(importlib.import_module("torch").__version__)


@functools.cache
def _defined(module: str) -> frozenset[str]:
    """The names that a module of torch defines at its top: what starts a line, as all sources there are formatted."""
    return frozenset(name for pair in _DEFINITION.findall(_source(module)) for name in pair if name)


@functools.cache
def _source(module: str) -> str:
    """The text of a module of torch; empty where there is none."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return ""
    # The parents of `module` are packages of torch, which find_spec would import.
    path = Path(torch.origin).parent.joinpath(*module.split(".")[1:])
    source = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
    return "" if source is None else source.read_text(encoding="utf-8")


def subject(name: str) -> TorchSubject:
    """Return the subject that a name with the prefix means, without values of options that this torch lacks.

    Raises:
        UsageError: there is none, or this torch has it not.
    """
    found = SUBJECTS.get(name.removeprefix(PREFIX))
    if found is None:
        raise UsageError(
            f"there is no subject '{name}'", f"PyTorch's are {', '.join(PREFIX + one for one in SUBJECTS)}"
        )
    if not found.here:
        raise UsageError(
            f"torch {installed_version()} has no {found.source}", f"'{name}' can be verified with {found.versions}"
        )
    return replace(found, draws={name: values for name, values in found.draws.items() if not found.lacks(name)})


_BUCKETING = "torch._inductor.fx_passes.bucketing"
_FSDP = "torch._inductor.fx_passes.fsdp"
_BUCKETS = "tcverify.pytorch.bucketing"
_PASSES = "torch._inductor.fx_passes"
_BOTH = (True, False)
_MODES = ("default", "custom_ops", "custom_ops_multidtype", "coalesced")
_CAPS = (2000.0, 0.0001, 0.001)
_FLAG = (False, True)
_OVERLAP_LISTS = (
    ("reorder_compute_for_overlap", "sink_waits", "raise_comms"),
    ("sink_waits", "raise_comms"),
    ("raise_comms", "sink_waits"),
    ("reorder_compute_for_overlap",),
    ("reorder_communication_preserving_peak_memory",),
    ("sink_waits_iterative",),
    (
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ),
    ("raise_comms", "sink_waits", "reorder_compute_for_overlap"),
    (),
)

_TRAINING_DRAWS: Mapping[str, tuple[Any, ...]] = {
    "order": ("alternate", "together", "evaluated"),
    "recompute": _FLAG,
    "kernels": ("by one", "together", "fused"),
    "given": ("trained", "all", "groups"),
    "aliases": _FLAG,
    "zeroed": _FLAG,
    "restored": ("no", "shards", "flat", "full", "flat and full", "broadcast"),
}

_FULLY_SHARD_DRAWS: Mapping[str, tuple[Any, ...]] = {
    "units": ("each", "pairs", "all"), "reshard": (True, False), "sync": ("each", "last", "all_reduce"),
    "keep": _FLAG, "prefetch": _FLAG, "dim": (0, 1), "divide": ("mean", "shards", "ranks"), "sums": _FLAG, "zeros": _FLAG,
    "unshard": _FLAG, "aborted": ("no", "forward", "backward"), "finalized": ("automatic", "manual", "handle"),
    "buffers": (1, 2), "storage": _FLAG, "wide": ("no", "reductions", "all", "forward and backward"), **_TRAINING_DRAWS,
}  # fmt: skip

_FSDP2 = "torch.distributed.fsdp._fully_shard._fully_shard"
_FULLY_SHARD_NEEDS = {
    "zeros": f"{_FSDP2}:set_reduce_scatter_unused_params",
    "aborted": f"{_FSDP2}:reset_iter_state",
    "buffers": f"{_FSDP2}:set_reduce_scatter_max_input_buffers",
    "finalized": f"{_FSDP2}:set_manual_backward_finalization",
    "storage": f"{_FSDP2}:set_keep_unsharded_storage",
}

_OVERLAP_DRAWS: Mapping[str, Sequence[Any]] = {
    "collective_bucketing": (False, True),
    "insert_overlap_deps": (False, True),
    "estimates": ("place", "torch", "sizes", "costs"),
    "compute_overlap_multipler": (1.0, 0.0, 0.5, 100.0, 1e6),
    "max_in_flight_gb": (5, 0.0, 1e-7, 1e-6, 4e-6),
    "max_compute_pre_fetch": (200, 0, 1, 2),
    "max_coll_distance": (200, 1, 3),
    "max_memory_increase_gb": (1.0, 0.0, 1e-6, None),
    "max_memory_increase_ratio": (0.05, 0.0, 1.0, None),
    "bucket_exposed_first": (None, True, False),
    "enable_fusion_regions": (False, True),
    "prioritize_bucketing_during_scheduling": (True, False),
    "max_off_bucket_gb": (0.5, 0.0, 1e-7, None),
    "bucket_mode": (None, *_MODES),
    "pre_bucketing_fsdp_collectives": (True, False),
    "bucket_only_internode_comms": (False, True),
}

_COMMS = "torch._inductor.comms"
_SCHEDULING = "tcverify.pytorch.scheduling"
_SCHEDULER_DRAWS: Mapping[str, Sequence[Any]] = {
    "effects": ("ordered", "declared"),
    "passes_before": (
        (),
        ("sink_waits",),
        ("raise_comms",),
        ("raise_comms", "sink_waits"),
        ("reorder_compute_for_overlap",),
        ("reorder_communication_preserving_peak_memory",),
        ("sink_waits_iterative",),
    ),
    "reorder_for_peak_memory": (True, False),
    "reorder_for_locality": (True, False),
    "aggressive_fusion": _FLAG,
    "estimate_op_runtime": ("default", "uneven"),
}
_FINAL_DRAWS = {name: values for name, values in _SCHEDULER_DRAWS.items() if name != "passes_before"}
_BUDGETS = (0.2, 0.0, 1.0)

_PARTS = "tcverify.pytorch.partitioning"
_CUTS = (0.5, 0.25, 0.75)

_ALL = (
    TorchSubject(
        "bucket_all_gather", f"{_BUCKETS}:BucketAllGather",
        "merges independent all_gathers of a group", f"{_BUCKETING}:bucket_all_gather",
        strategy="bucketing", draws={"mode": _MODES[:3], "cap_mb": _CAPS},
    ),
    TorchSubject(
        "bucket_reduce_scatter", f"{_BUCKETS}:BucketReduceScatter",
        "merges independent reduce_scatters of a group", f"{_BUCKETING}:bucket_reduce_scatter",
        strategy="bucketing", draws={"mode": ("default", "custom_ops", "coalesced"), "cap_mb": _CAPS},
    ),
    TorchSubject(
        "bucket_all_reduce", f"{_BUCKETS}:BucketAllReduce",
        "merges independent all_reduces of a group", f"{_BUCKETING}:bucket_all_reduce", since="2.11",
        strategy="bucketing", draws={"cap_mb": _CAPS},
    ),
    TorchSubject(
        "bucket_collectives", f"{_BUCKETS}:BucketCollectives",
        "buckets reduce_scatters, all_reduces and all_gathers, as Inductor does", f"{_BUCKETING}:bucket_all_gather",
        strategy="bucketing", draws={"mode": _MODES[:3], "cap_mb": _CAPS, "fsdp": (False, True)},
    ),
    TorchSubject(
        "bucket_fsdp_all_gather", f"{_BUCKETS}:BucketFsdpAllGather",
        "merges all_gathers of parameters", f"{_FSDP}:bucket_fsdp_all_gather",
        strategy="bucketing", draws={"mode": _MODES[:3], "cap_mb": _CAPS},
    ),
    TorchSubject(
        "bucket_fsdp_reduce_scatter", f"{_BUCKETS}:BucketFsdpReduceScatter",
        "merges reduce_scatters of gradients", f"{_FSDP}:bucket_fsdp_reduce_scatter",
        strategy="bucketing", draws={"mode": ("default", "custom_ops", "coalesced"), "cap_mb": _CAPS},
    ),
    TorchSubject(
        "pre_bucket_fsdp_collectives", f"{_BUCKETS}:PreBucketFsdp",
        "merges collectives of the groups over which parameters are gathered", f"{_FSDP}:pre_bucket_fsdp_collectives",
        since="2.13", strategy="bucketing",
        draws={"mode": ("unset", *_MODES), "cap_mb": _CAPS, "bucket_mode": ("unset", "custom_ops_multidtype")},
    ),
    TorchSubject(
        "dedup_fsdp_reduce_scatter", f"{_BUCKETS}:DedupReduceScatter",
        "merges reduce_scatters whose results are summed", f"{_FSDP}:dedup_fsdp_reduce_scatter",
        since="2.13", strategy="bucketing",
    ),
    TorchSubject(
        "compile", "tcverify.pytorch.compiling:Compile",
        "compiles the graph to Inductor's generated code", "torch._inductor.compile_fx:compile_fx",
        strategy="functional,compiled",
        draws={
            "effects": ("ordered", "declared"),
            "compiled_ranks": ("all", "first", "even", "odd"),
            "reorder_for_compute_comm_overlap": _FLAG,
            "reorder_for_compute_comm_overlap_passes": _OVERLAP_LISTS,
            "reorder_for_peak_memory": (True, False),
            "allow_buffer_reuse": (True, False),
            "inplace_buffers": (True, False),
            "reorder_for_locality": (True, False),
            "aggressive_fusion": _FLAG,
        },
    ),
    TorchSubject(
        "comms.sink_waits", f"{_SCHEDULING}:SinkWaits",
        "moves waits as late as possible in Inductor's schedule", f"{_COMMS}:sink_waits", draws=_SCHEDULER_DRAWS,
    ),
    TorchSubject(
        "comms.raise_comms", f"{_SCHEDULING}:RaiseComms",
        "moves collectives as early as possible in Inductor's schedule", f"{_COMMS}:raise_comms", draws=_SCHEDULER_DRAWS,
    ),
    TorchSubject(
        "comms.reorder_compute_for_overlap", f"{_SCHEDULING}:ReorderCompute",
        "moves compute between collectives and their waits", f"{_COMMS}:reorder_compute_for_overlap",
        draws=_SCHEDULER_DRAWS,
    ),
    TorchSubject(
        "comms.reorder_communication_preserving_peak_memory", f"{_SCHEDULING}:PreservePeakMemory",
        "moves collectives earlier, within a memory budget", f"{_COMMS}:reorder_communication_preserving_peak_memory",
        draws={
            **_SCHEDULER_DRAWS,
            "reorder_iterative_peak_memory_budget": _BUDGETS,
            "reorder_iterative_unsafe_collectives_reorder": (True, False),
            "reorder_iterative_use_runtime_estimations": _FLAG,
            "reorder_iterative_group_with_collectives": _FLAG,
        },
    ),
    TorchSubject(
        "comms.sink_waits_iterative", f"{_SCHEDULING}:SinkWaitsIterative",
        "moves waits later, within a memory budget", f"{_COMMS}:sink_waits_iterative",
        draws={
            **_SCHEDULER_DRAWS,
            "sink_iterative_peak_memory_budget": _BUDGETS,
            "sink_waits_iterative_unsafe_collectives_reorder": (True, False),
            "sink_iterative_use_runtime_estimations": _FLAG,
            "sink_waits_iterative_swap_with_collectives": _FLAG,
        },
    ),
    TorchSubject(
        "comms.simple_overlap", f"{_SCHEDULING}:SimpleOverlap",
        "moves collectives earlier and waits later, in swaps of neighbours", f"{_COMMS}:simple_overlap", since="2.15",
        draws=_SCHEDULER_DRAWS,
    ),
    TorchSubject(
        "comms.decide_global_ordering_of_comms", "tcverify.pytorch.ordering:DecideOrdering",
        "keeps the graph's order of collectives in Inductor's scheduler", f"{_COMMS}:decide_global_ordering_of_comms",
        draws={**_FINAL_DRAWS, "passes": ((), *_OVERLAP_LISTS[:4])},
    ),
    TorchSubject(
        "comm_lowering", "tcverify.pytorch.comm_buffers:CommLowering",
        "lowers small all_reduces to symmetric memory: only lowering and order, because the code needs CUDA",
        "torch._inductor.comm_lowering:register_comm_lowerings",
        draws={**_FINAL_DRAWS, "one_shot_all_reduce_threshold_bytes": (131072, 0, 64)},
    ),
    TorchSubject(
        "dtensor", "tcverify.pytorch.dtensor:DTensorProgram",
        "shards tensors, and lowers ops on DTensors to each rank's ops", "torch.distributed.tensor._api:DTensor",
        strategy="dtensor",
    ),
    TorchSubject(
        "loss_parallel", "tcverify.pytorch.loss_parallel:LossParallel",
        "computes cross entropy of logits whose classes are sharded", "torch.distributed.tensor.parallel.loss:loss_parallel",
        strategy="cross-entropy",
    ),
    TorchSubject(
        "checkpoint", "tcverify.pytorch.checkpoint:Checkpoint",
        "saves tensors as a distributed checkpoint, and loads them in other layouts",
        "torch.distributed.checkpoint.default_planner:DefaultSavePlanner", strategy="dtensor",
        draws={
            "saved": ("line", "same", "turned", "next", "square", "transposed", "backwards", "replicated", "plain"),
            "dedup_save_to_lowest_rank": _FLAG, "enable_plan_caching": _FLAG,
            "flatten_state_dict": _BOTH, "flatten_sharded_tensors": _BOTH,
        },
    ),
    TorchSubject(
        "pipelining", "tcverify.pytorch.pipelining:PipelineSchedule",
        "runs the stages of a model under a schedule of pipeline parallelism",
        "torch.distributed.pipelining.schedules:get_schedule_class", strategy="pipelining",
        draws={"actions": ("own", "compute_only", "compute_comms"), "defer_pp_recv": _FLAG},
    ),
    TorchSubject(
        "fully_shard", "tcverify.pytorch.fully_shard:FullyShard", "shards the parameters of a model, and trains it (FSDP2)",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup", since="2.10", strategy="training",
        draws={**_FULLY_SHARD_DRAWS, "hook": _FLAG}, needs=_FULLY_SHARD_NEEDS,
    ),
    TorchSubject(
        "tensor_parallel", "tcverify.pytorch.tensor_parallel:TensorParallel",
        "shards the parameters of a model as DTensors, alone or under FSDP2",
        "torch.distributed.tensor._api:distribute_tensor", since="2.10", strategy="tensor-parallel",
        draws={
            "weights": ("S0", "S1", "mixed", "R"), "activations": ("R", "S0", "S1"), "parts": ("stage", "model", "loss"),
            "whole": ("no", "shard", "replicate"), **_FULLY_SHARD_DRAWS,
        },
        needs=_FULLY_SHARD_NEEDS,
    ),
    TorchSubject(
        "ddp", "tcverify.pytorch.ddp:DistributedDataParallelPass",
        "reduces gradients in buckets while a model is trained", "torch.nn.parallel.distributed:DistributedDataParallel",
        since="2.10", strategy="training",
        draws={
            "bucket": (16, 1, 64, 1 << 20), "unused": _FLAG, "static": _FLAG, "views": _FLAG, "sync": ("each", "last"),
            "shards": ("no", "parameters", "buckets"), **_TRAINING_DRAWS,
        },
    ),
    TorchSubject(
        "autograd", "tcverify.pytorch.autograd:Autograd", "finds the gradients of forward passes with collectives",
        "torch.distributed._functional_collectives:all_reduce_backward", since="2.11", strategy="gradients",
        draws={"run": ("eager", "recomputed", "default", "min-cut", "nn"), "functions": ("plain", "autograd")},
    ),
    TorchSubject(
        "context_parallel", "tcverify.pytorch.context_parallel:ContextParallel",
        "divides sequences over ranks, and sends keys and values around",
        "torch.distributed.tensor.experimental._context_parallel._attention:context_parallel", since="2.10", strategy="attention",
        draws={
            "api": ("context", "modules"), "balanced": _BOTH, "rotate": ("allgather", "alltoall"), "buffers": ("copies", "views"),
            "backward": ("inside", "outside"), "recompute": _FLAG,
        },
    ),
    TorchSubject(
        "schedule_overlap_bucketing", "tcverify.pytorch.overlap:ScheduleOverlapBucketing",
        "overlaps compute with communication, and buckets collectives",
        f"{_PASSES}.overlap_scheduling:schedule_overlap_bucketing", since="2.11",
        strategy="traced", draws=_OVERLAP_DRAWS,
    ),
    TorchSubject(
        "memory_estimator", "tcverify.pytorch.memory_estimates:MemoryEstimator",
        "estimates the memory of graphs, in the order of their nodes or in another one",
        f"{_PASSES}.memory_estimator:MemoryTracker", since="2.11", strategy="traced",
        draws={"order": ("given", "latest", "mixed"), "inputs": ("kept", "released"), "aliases": ("run", "torch")},
    ),
    TorchSubject(
        "mem_tracker", "tcverify.pytorch.memory_estimates:MemTracked",
        "tracks the memory of what runs, on fake tensors too", "torch.distributed._tools.mem_tracker:MemTracker",
        strategy="traced", draws={"order": ("given", "latest", "mixed"), "inputs": ("kept", "released"), "fake": _FLAG},
    ),
    TorchSubject(
        "manual_overlap_bucketing", "tcverify.pytorch.overlap:ManualOverlapBucketing",
        "merges the collectives of a module, and overlaps them with the compute of the next",
        f"{_PASSES}.overlap_manual_scheduling:manual_overlap_bucketing", since="2.11", strategy="bucketing",
        draws={
            "modules": (2, 1, 3, 4), "plan": ("each", "pairs", "one"), "insert_overlap_deps": (False, True),
            "bucket_mode": (None, *_MODES),
        },
    ),
    TorchSubject(
        "low_contention_collectives", "tcverify.pytorch.substituting:LowContentionCollectives",
        "runs all_gathers and reduce_scatters on copy engines",
        f"{_PASSES}.low_contention_collectives:replace_collectives_with_low_contention", since="2.13",
        strategy="traced", draws={"groups": ("all", "first"), "min_bytes": (0, 64, 512), "skip_overlap_check": (True, False)},
    ),
    TorchSubject(
        "decomp_comms", "tcverify.pytorch.substituting:DecompComms",
        "replaces all_gathers before Gram matrices with all_reduces", f"{_PASSES}.decomp_comms:decomp_comms", since="2.13",
        strategy="gram",
    ),
    TorchSubject(
        "post_grad_passes", "tcverify.pytorch.post_grad:PostGradPasses",
        "the passes that torch.compile runs on every graph after autograd",
        f"{_PASSES}.post_grad:post_grad_passes", strategy="compiled",
        draws={
            "is_inference": _BOTH, "reorder_for_locality": _BOTH, "pattern_matcher": _BOTH,
            "bucket": ("none", "all_gather", "reduce_scatter", "all_gather+reduce_scatter+all_reduce"),
            "micro_pipeline": _BOTH[::-1], "fuse_ddp": _BOTH[::-1],
        },
    ),
    TorchSubject(
        "post_grad_fusions", "tcverify.pytorch.post_grad:PostGradFusions",
        "fuses like ops into one of a batch, and merges splits and parts, as post_grad_fusion_options ask for",
        f"{_PASSES}.group_batch_fusion:group_batch_fusion_passes", strategy="compiled",
        draws={
            "fusions": (
                "batch_aten_add+batch_aten_sub+batch_aten_mul+batch_aten_div",
                "batch_aten_tanh+batch_aten_sigmoid+batch_aten_relu",
                "batch_linear_post_grad+batch_aten_add",
                "normalization_aten_pass+split_cat_aten_pass",
                "normalization_aten_pass+select_cat_aten_pass",
                "batch_aten_mul+batch_aten_add+normalization_aten_pass+unbind_stack_aten_pass",
                "normalization_aten_pass+move_view_after_cat_aten_pass",
                "decompose_mm_pass",
            ),
            "min_fuse_set_size": (2, 5), "max_fuse_search_depth": (5, 2),
            "fuse_nodes_with_same_parent": _BOTH[::-1], "fuse_nodes_with_same_users": _BOTH[::-1],
            "shape_broadcast_batch_linear": _BOTH[::-1], "threshold_to_cat": (2, 10),
        },
    ),
    TorchSubject(
        "joint_graph_passes", "tcverify.pytorch.post_grad:JointGraphPasses",
        "the passes that torch.compile runs on the joint graph of forward and backward",
        f"{_PASSES}.joint_graph:joint_graph_passes",
        strategy="compiled", draws={"joint_graph_constant_folding": _BOTH, "pattern_matcher": _BOTH},
    ),
    TorchSubject(
        "reinplace", "tcverify.pytorch.post_grad:Reinplace",
        "lets ops write into operands that are no longer read",
        f"{_PASSES}.reinplace:reinplace_inplaceable_ops", strategy="compiled",
    ),
    TorchSubject(
        "ddp_fusion", "tcverify.pytorch.ddp_fusion:FuseDdp",
        "merges all_reduces of gradients", f"{_PASSES}.ddp_fusion:fuse_ddp_communication", strategy="compiled",
        draws={
            "passes": (
                "fuse_ddp_with_concat_op+schedule_comm_wait", "fuse_ddp_with_coalesced_op+schedule_comm_wait",
                "fuse_ddp_with_concat_op", "fuse_ddp_with_coalesced_op", "schedule_comm_wait",
            ),
            "bucket_size_mb": (25, 0, 1),
        },
    ),
    TorchSubject(
        "micro_pipeline_tp", "tcverify.pytorch.micro_pipeline:MicroPipelineTp",
        "fuses matmuls with collectives", f"{_PASSES}.micro_pipeline_tp:micro_pipeline_tp_pass",
        strategy="compiled", draws={"reorder_for_compute_comm_overlap": _BOTH[::-1]},
    ),
    TorchSubject(
        "reinplace_fsdp_all_gather", "tcverify.pytorch.fsdp_graphs:ReinplaceFsdpAllGather",
        "lets FSDP's all_gathers write into its buffer",
        "torch._inductor.comms:reinplace_fsdp_all_gather", until="2.12", strategy="fsdp",
    ),
    TorchSubject(
        "remove_fsdp2_unsharded_param_graph_input_usage", "tcverify.pytorch.fsdp_graphs:RemoveUnsharded",
        "uses gathered parameters directly, not through a graph input",
        f"{_COMMS}:remove_fsdp2_unsharded_param_graph_input_usage", until="2.12", strategy="fsdp",
    ),
    TorchSubject(
        "activation_offloading", "tcverify.pytorch.offloading:ActivationOffload",
        "moves what the forward saves to the host, and back in the backward",
        "torch._functorch._activation_offloading.activation_offloading:offload_chosen_sets_async",
        since="2.12", strategy="compiled",
        draws={
            "cut": _CUTS, "partitioner": ("default", "min_cut"), "marked": ("all", "even", "odd"), "inputs": _FLAG,
            "separate_stream": _BOTH, "sink_wait": _FLAG, "prefetch": _FLAG,
        },
    ),
    TorchSubject(
        "backward_streams", "tcverify.pytorch.backward_streams:BackwardStreams",
        "puts events between nodes of a backward that run on different streams",
        "torch._functorch._aot_autograd.streams:insert_backward_syncs", since="2.10", strategy="structured,wild",
        draws={
            "streams": (2, 3, 4), "run": (1, 2, 3, 5), "sums": _BOTH, "order": ("traced", "late", "early"), "reuse": _BOTH,
        },
    ),
    TorchSubject(
        "user_streams", "tcverify.pytorch.user_streams:UserStreams",
        "ties the waits of code on several streams to the nodes around them",
        "torch._functorch._aot_autograd.streams:wrap_all_sync_nodes_with_control_deps", since="2.12", strategy="structured,wild",
        draws={
            "streams": (2, 3, 4), "run": (1, 2, 3, 5), "annotated": ("side", "all"),
            "waits": ("event", "wait_stream", "synchronize_event", "synchronize_stream", "synchronize_device", "mixed"),
            "events": ("each", "stream", "one"), "place": ("reader", "apart", "producer"),
            "order": ("late", "early", "apart", "traced"),
        },
    ),
    TorchSubject(
        "compiled_streams", "tcverify.pytorch.compiled_streams:CompiledStreams",
        "compiles code on several streams: kernels, events, and buffers that are used again",
        "torch._inductor.codegen.wrapper:EnterCudaStreamContextLine", since="2.12", strategy="structured,wild",
        draws={
            "streams": (2, 3, 4), "run": (1, 2, 3, 5), "annotated": ("side", "all"),
            "waits": ("event", "wait_stream", "synchronize_event", "synchronize_stream", "synchronize_device", "mixed"),
            "events": ("each", "stream", "one"), "place": ("reader", "apart", "producer"),
            "allow_buffer_reuse": _BOTH, "inplace_buffers": _BOTH, "caching": _FLAG,
        },
    ),
    TorchSubject(
        "split_module", "tcverify.pytorch.splitting:SplitModule",
        "splits a graph into submodules that are compiled one by one", "torch.fx.passes.split_module:split_module",
        strategy="functional,effects",
        draws={"run": (3, 1, 2, 5, "collectives"), "keep_original_order": _FLAG},
    ),
    TorchSubject(
        "pipeline", "tcverify.pytorch.stages:TracedStages",
        "traces a model and splits it into the stages of a pipeline", "torch.distributed.pipelining._IR:pipeline",
        strategy="traced", draws={"run": (3, 1, 2, 5)},
    ),
    TorchSubject(
        "regional_inductor", "tcverify.pytorch.splitting:RegionalInductor",
        "moves what users mark into submodules, which alone are compiled", "torch.fx.passes.regional_inductor:_RegionScooper",
        since="2.10", strategy="compiled", draws={"run": (2, 1, 3), "regions": (1, 2, 3)},
    ),
    TorchSubject(
        "functionalize_collectives", "tcverify.pytorch.functionalizing:FunctionalizeCollectives",
        "makes in-place collectives functional, in graphs that make_fx traced",
        "torch._inductor._functionalize_collectives:_functionalize_inplace_collectives", since="2.13",
        strategy="functional,wild",
    ),
    TorchSubject(
        "fx_graph_cse", f"{_PARTS}:MergeEqual",
        "merges equal calls, as in the default partitioner", "torch._functorch.compile_utils:fx_graph_cse",
        strategy="effects",
    ),
    TorchSubject(
        "default_partition", f"{_PARTS}:DefaultPartition",
        "splits a graph into forward and backward, as for backends on AOTAutograd",
        "torch._functorch.partitioners:default_partition", strategy="effects", draws={"cut": _CUTS},
    ),
    TorchSubject(
        "min_cut_partition", f"{_PARTS}:MinCutPartition",
        "splits a graph into forward and backward, as for Inductor",
        "torch._functorch.partitioners:min_cut_rematerialization_partition",
        strategy="effects", draws={"cut": _CUTS},
    ),
)  # fmt: skip

#: What can be verified, by name without the prefix.
SUBJECTS: dict[str, TorchSubject] = {one.name: one for one in _ALL}

__all__ = ["PREFIX", "SUBJECTS", "TorchSubject", "installed_version", "release", "subject"]
