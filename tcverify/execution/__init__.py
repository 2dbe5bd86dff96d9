"""Runs programs: one interpreter, driven in lockstep or by real process groups."""

from tcverify.execution.any_size import AnySize, of_any_size
from tcverify.execution.arena import ArenaRun, Clobber, has_buffers, run_in_arena
from tcverify.execution.asynchrony import Timing
from tcverify.execution.compare import Delta, compare_ranks, digest, pooled
from tcverify.execution.exact_differences import Explanation, explain
from tcverify.execution.executor import Comparison, Executor, Hang, Run, Wait
from tcverify.execution.extremes import WORDS, Extreme, overlapped_starts, play, play_extremes
from tcverify.execution.interpreter import Call, NodeError, RankResult
from tcverify.execution.lockstep.lockstep import Lockstep
from tcverify.execution.named_executors import (
    EXECUTORS,
    close_executor,
    executors,
    make_executor,
    register_executor,
    start_executor,
)
from tcverify.execution.process_group.pool import ProcessGroupPool
from tcverify.execution.rounding import Noise, rounding_noise
from tcverify.execution.streams.cuda_ranks import explore_on_cuda
from tcverify.execution.streams.exploration import Exploration, Order, explore
from tcverify.execution.streams.observations import Event
from tcverify.registry.executors import MAX_RANKS

__all__ = [
    "EXECUTORS",
    "MAX_RANKS",
    "WORDS",
    "AnySize",
    "ArenaRun",
    "Call",
    "Clobber",
    "Comparison",
    "Delta",
    "Event",
    "Executor",
    "Explanation",
    "Exploration",
    "Extreme",
    "Hang",
    "Lockstep",
    "NodeError",
    "Noise",
    "Order",
    "ProcessGroupPool",
    "RankResult",
    "Run",
    "Timing",
    "Wait",
    "close_executor",
    "compare_ranks",
    "digest",
    "executors",
    "explain",
    "explore",
    "explore_on_cuda",
    "has_buffers",
    "make_executor",
    "of_any_size",
    "overlapped_starts",
    "play",
    "play_extremes",
    "pooled",
    "register_executor",
    "rounding_noise",
    "run_in_arena",
    "start_executor",
]
