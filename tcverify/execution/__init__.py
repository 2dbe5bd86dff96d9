"""Runs programs: one interpreter, driven in lockstep or by real process groups."""

from tcverify.execution.compare import Delta, compare_ranks, digest, pooled
from tcverify.execution.cuda_ranks import backend_of, explore_on_cuda
from tcverify.execution.executor import Comparison, Executor, Hang, Run, Wait
from tcverify.execution.exploration import Exploration, Order, explore
from tcverify.execution.interpreter import Call, NodeError, RankResult
from tcverify.execution.laws import Explanation, explain
from tcverify.execution.lockstep import Lockstep
from tcverify.execution.observations import Event, Observation
from tcverify.execution.pool import ProcessGroupPool
from tcverify.execution.rounding import Noise, rounding_noise

__all__ = [
    "Call",
    "Comparison",
    "Delta",
    "Event",
    "Executor",
    "Explanation",
    "Exploration",
    "Hang",
    "Lockstep",
    "NodeError",
    "Noise",
    "Observation",
    "Order",
    "ProcessGroupPool",
    "RankResult",
    "Run",
    "Wait",
    "backend_of",
    "compare_ranks",
    "digest",
    "explain",
    "explore",
    "explore_on_cuda",
    "pooled",
    "rounding_noise",
]
