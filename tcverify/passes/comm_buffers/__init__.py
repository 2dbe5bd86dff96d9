"""Comm-buffer lowering: operands of collectives live in registered communication buffers, always at the same place."""

from tcverify.passes.comm_buffers.comm_buffers import CommBuffers
from tcverify.passes.comm_buffers.plan import Buffer, BufferPlan

__all__ = ["Buffer", "BufferPlan", "CommBuffers"]
