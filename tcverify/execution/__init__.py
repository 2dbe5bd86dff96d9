"""Runs programs: one interpreter, driven in lockstep or by real process groups."""

from tcverify.execution.any_size import AnySize, of_any_size
from tcverify.execution.arena import ArenaRun, Clobber, has_buffers, run_in_arena
from tcverify.execution.async_extremes import WORDS, Extreme, overlapped_starts, run_at_extreme, run_at_extremes
from tcverify.execution.asynchrony import Timing
from tcverify.execution.compare import Delta, compare_ranks, digest, pooled_rms
from tcverify.execution.exact_differences import Explanation, explain
from tcverify.execution.executor import CollectiveWait, Comparison, Executor, Hang, Run
from tcverify.execution.interpreter import CollectiveCall, NodeError, RankResult
from tcverify.execution.lockstep.lockstep import Lockstep
from tcverify.execution.named_executors import (
    EXECUTORS,
    close_executor,
    device_of,
    executors,
    make_executor,
    register_executor,
    start_executor,
)
from tcverify.execution.process_group.pool import ProcessGroupPool
from tcverify.execution.rounding import Noise, range_used, rounding_noise
from tcverify.execution.streams.cuda_streams import explore_on_cuda
from tcverify.execution.streams.exploration import Exploration, StreamOrder, explore
from tcverify.execution.streams.observations import Event
from tcverify.registry.executors import MAX_RANKS

__all__ = [
    "EXECUTORS",
    "MAX_RANKS",
    "WORDS",
    "AnySize",
    "ArenaRun",
    "Clobber",
    "CollectiveCall",
    "CollectiveWait",
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
    "ProcessGroupPool",
    "RankResult",
    "Run",
    "StreamOrder",
    "Timing",
    "close_executor",
    "compare_ranks",
    "device_of",
    "digest",
    "executors",
    "explain",
    "explore",
    "explore_on_cuda",
    "has_buffers",
    "make_executor",
    "of_any_size",
    "overlapped_starts",
    "pooled_rms",
    "range_used",
    "register_executor",
    "rounding_noise",
    "run_at_extreme",
    "run_at_extremes",
    "run_in_arena",
    "start_executor",
]
