"""Matmuls and the communication of their operands or results, cut into chunks that overlap on streams."""

from tcverify.passes.resharding.pipelined.pipelined import PipelinedMatmul

__all__ = ["PipelinedMatmul"]
