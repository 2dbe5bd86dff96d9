"""Comm-buffer lowering: operands of collectives are placed in registered communication buffers at fixed offsets."""

from tcverify.passes.comm_buffers.comm_buffers import CommBuffers
from tcverify.passes.comm_buffers.plan import Buffer, BufferPlan

__all__ = ["Buffer", "BufferPlan", "CommBuffers"]
