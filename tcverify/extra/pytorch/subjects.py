"""What of PyTorch can be verified by name, and in which of its versions that exists. Data; importing it imports no pass."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tcverify.errors import UsageError

PREFIX = "torch:"


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
        strategy: which programs give it something to do.
        draws: values of its options, by name, the default first.
    """

    name: str
    target: str
    what: str
    source: str
    since: str = "2.9"
    until: str | None = None
    strategy: str = "functional"
    draws: Mapping[str, Sequence[Any]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def versions(self) -> str:
        """The versions of torch that have it, in words."""
        return f"torch {self.since} and later" if self.until is None else f"torch {self.since} to {self.until}"

    @property
    def here(self) -> bool:
        """Whether this torch has it."""
        module, _, name = self.source.partition(":")
        return name in _defined(module)


@functools.cache
def _defined(module: str) -> frozenset[str]:
    """The names that a module defines, read from its source: importing Inductor takes seconds."""
    # The parents of `module` are packages of torch, which find_spec would import.
    path = Path(torch.__file__).parent.joinpath(*module.split(".")[1:])
    source = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
    if source is None:
        return frozenset()
    found: set[str] = set()
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign):
            found.update(target.id for target in statement.targets if isinstance(target, ast.Name))
    return frozenset(found)


def subject(name: str) -> TorchSubject:
    """Return the subject that a name with the prefix means.

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
            f"torch {torch.__version__} has no {found.source}", f"'{name}' can be verified with {found.versions}"
        )
    return found


_BUCKETING = "torch._inductor.fx_passes.bucketing"
_PASSES = "torch._inductor.fx_passes"
_BOTH = (True, False)
_MODES = ("default", "custom_ops", "custom_ops_multidtype", "coalesced")
_CAPS = (2000.0, 0.0, 0.0001, 0.001)

_ALL = (
    TorchSubject(
        "bucket_all_gather", "tcverify.extra.pytorch.bucketing:BucketAllGather",
        "independent all_gathers of a group become one", f"{_BUCKETING}:bucket_all_gather",
        draws={"mode": _MODES[:3], "cap_mb": _CAPS},
    ),
    TorchSubject(
        "post_grad_passes", "tcverify.extra.pytorch.post_grad:PostGradPasses",
        "what torch.compile runs on every graph behind autograd", f"{_PASSES}.post_grad:post_grad_passes", strategy="compiled",
        draws={
            "is_inference": _BOTH, "reorder_for_locality": _BOTH, "pattern_matcher": _BOTH,
            "bucket": ("none", "all_gather", "reduce_scatter", "all_gather+reduce_scatter+all_reduce"),
            "micro_pipeline": _BOTH[::-1], "fuse_ddp": _BOTH[::-1],
        },
    ),
    TorchSubject(
        "joint_graph_passes", "tcverify.extra.pytorch.post_grad:JointGraphPasses",
        "what torch.compile runs on forward and backward together", f"{_PASSES}.joint_graph:joint_graph_passes",
        strategy="compiled", draws={"joint_graph_constant_folding": _BOTH, "pattern_matcher": _BOTH},
    ),
    TorchSubject(
        "reinplace", "tcverify.extra.pytorch.post_grad:Reinplace",
        "ops write into what nobody reads any more", f"{_PASSES}.reinplace:reinplace_inplaceable_ops", strategy="compiled",
    ),
    TorchSubject(
        "ddp_fusion", "tcverify.extra.pytorch.ddp_fusion:FuseDdp",
        "all_reduces of gradients become few", f"{_PASSES}.ddp_fusion:fuse_ddp_communication", strategy="compiled",
        draws={
            "passes": (
                "fuse_ddp_with_concat_op+schedule_comm_wait", "fuse_ddp_with_coalesced_op+schedule_comm_wait",
                "fuse_ddp_with_concat_op", "fuse_ddp_with_coalesced_op", "schedule_comm_wait",
            ),
            "bucket_size_mb": (25, 0, 1),
        },
    ),
    TorchSubject(
        "micro_pipeline_tp", "tcverify.extra.pytorch.micro_pipeline:MicroPipelineTp",
        "products beside collectives become fused ops", f"{_PASSES}.micro_pipeline_tp:micro_pipeline_tp_pass",
        strategy="compiled", draws={"reorder_for_compute_comm_overlap": _BOTH[::-1]},
    ),
    TorchSubject(
        "reinplace_fsdp_all_gather", "tcverify.extra.pytorch.fsdp_graphs:ReinplaceFsdpAllGather",
        "FSDP gathers into its own buffer", "torch._inductor.comms:reinplace_fsdp_all_gather", until="2.11", strategy="fsdp",
    ),
)  # fmt: skip

#: What can be verified, by name without the prefix.
SUBJECTS: dict[str, TorchSubject] = {one.name: one for one in _ALL}

__all__ = ["PREFIX", "SUBJECTS", "TorchSubject", "subject"]
