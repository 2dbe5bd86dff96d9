"""What ranks tell each other about one call of a pass, through the store of the default process group.

No collectives: these would come between those of the model. Nobody waits for longer than a limit, whatever the others do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

#: Seconds that the first rank may take to judge, beside what it takes to make a counterexample small.
JUDGING = 300.0

#: Seconds between two looks at the store.
_PAUSE = 0.005


class RanksMissing(Exception):
    """Ranks did not show up in time. Fields: ranks, and seconds that were waited."""

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(
            f"rank{'s' * (len(ranks) > 1)} {names} did not respond within {seconds:g} s: late, or compiling "
            "other graphs"
        )
        self.ranks = tuple(ranks)


def exchange_with_rank_0(
    key: str,
    rank: int,
    world_size: int,
    mine: Any,
    decide: Callable[[list[Any]], Any],
    *,
    timeout: float,
    extra: float = 0.0,
) -> Any:
    """Hand this rank's data to rank 0, which decides for all; return what it decides.

    Args:
        key: of this call: the same on all ranks, and of no other call.
        mine: JSON-able.
        decide: called on rank 0 with the data of all ranks; gives JSON-able data, and never raises.
        timeout: seconds to wait for ranks to show up.
        extra: seconds that deciding may take beside `JUDGING`.

    Raises:
        Missing: on all ranks that are there: others did not show up.
        RuntimeError: the store is gone.
    """
    store = dist.distributed_c10d._get_default_store()
    if rank > 0:
        store.set(f"{key}/{rank}", json.dumps(mine))
        if not _wait(store, f"{key}/here", timeout):
            raise RanksMissing([0], timeout)
        limit = timeout + extra + JUDGING
        if not _wait(store, f"{key}/reply", limit):
            raise RanksMissing([0], limit)
        reply = json.loads(store.get(f"{key}/reply"))
    else:
        store.set(f"{key}/here", "1")
        deadline = time.monotonic() + timeout
        there = [_wait(store, f"{key}/{other}", deadline - time.monotonic()) for other in range(1, world_size)]
        missing = [other for other, came in enumerate(there, 1) if not came]
        if missing:
            reply = {"missing": missing}
        else:
            reply = {"decided": decide([mine, *(json.loads(store.get(f"{key}/{r}")) for r in range(1, world_size))])}
        store.set(f"{key}/reply", json.dumps(reply))
        for other in range(1, world_size):
            with suppress(RuntimeError, NotImplementedError):  # not every store can
                store.delete_key(f"{key}/{other}")
    if "missing" in reply:
        raise RanksMissing(reply["missing"], timeout)
    return reply["decided"]


def _wait(store: Any, key: str, seconds: float) -> bool:
    """Wait for a key. Looks every now and then: a store that waits by itself complains loudly when nobody comes."""
    deadline = time.monotonic() + seconds
    pause = _PAUSE
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)
    return True


__all__ = ["JUDGING", "RanksMissing", "exchange_with_rank_0"]
