"""Passes that move nodes so that communication runs while something computes, and what they share."""

from tcverify.passes.overlap.graph import (
    CommGraph,
    Communication,
    Kind,
    comm_graph,
    is_gemm_like,
    is_valid_order,
    placed,
)

__all__ = ["CommGraph", "Communication", "Kind", "comm_graph", "is_gemm_like", "is_valid_order", "placed"]
