"""Sequence parallelism: what follows an all_reduce works on this rank's tokens only."""

from tcverify.passes.sequence_parallel.sequence_parallel import SequenceParallel

__all__ = ["SequenceParallel"]
