"""The passes that ship with tcverify."""

from tcverify.passes.base import Pass, disable_passes
from tcverify.passes.comm_buffers import CommBuffers
from tcverify.passes.identity import Identity
from tcverify.passes.multistream import Multistream
from tcverify.passes.overlap import ReorderForComputeCommOverlap
from tcverify.passes.sequence_parallel import SequenceParallel
from tcverify.registry.passes import BUILTIN, DEFAULT, DESCRIPTIONS, OVERLAP_PASSES, RESHARDING_PASSES, SUITED

__all__ = [
    "BUILTIN",
    "DEFAULT",
    "DESCRIPTIONS",
    "OVERLAP_PASSES",
    "RESHARDING_PASSES",
    "SUITED",
    "CommBuffers",
    "Identity",
    "Multistream",
    "Pass",
    "ReorderForComputeCommOverlap",
    "SequenceParallel",
    "disable_passes",
]
