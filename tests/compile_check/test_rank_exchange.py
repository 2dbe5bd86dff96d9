"""What ranks tell each other through a store: real stores of torch, every rank a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tcverify.compile_check import rank_exchange
from tcverify.compile_check.rank_exchange import RanksMissing, exchange_with_rank_0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    made = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: made)
    return made


def together(world_size: int, work: Callable[[int], Any], there: list[int] | None = None) -> dict[int, Any]:
    """What `work` gives or raises on every rank that is there."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 - what ranks raise is what is asked
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (range(world_size) if there is None else there)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def test_rank_0_decides_for_all(store: dist.Store) -> None:
    calls = []

    def decide(theirs: list[Any]) -> Any:
        calls.append(threading.get_ident())
        return {"sum": sum(theirs)}

    found = together(4, lambda rank: exchange_with_rank_0("k/1", rank, 4, rank * 10, decide, timeout=20))
    assert found == {rank: {"sum": 60} for rank in range(4)}
    assert len(calls) == 1
    found = together(
        4, lambda rank: exchange_with_rank_0("k/2", rank, 4, 1, decide, timeout=20)
    )  # another call, another key
    assert found == {rank: {"sum": 4} for rank in range(4)}


@pytest.mark.parametrize(("there", "missing"), [([0, 1], (2,)), ([0], (1, 2)), ([1, 2], (0,))])
def test_ranks_that_do_not_show_up_are_named(store: dist.Store, there: list[int], missing: tuple[int, ...]) -> None:
    start = time.monotonic()
    found = together(3, lambda rank: exchange_with_rank_0("k", rank, 3, rank, sum, timeout=0.3), there)
    assert time.monotonic() - start < 15
    assert {rank: error.ranks for rank, error in found.items()} == {rank: missing for rank in there}
    assert all(isinstance(error, RanksMissing) for error in found.values())
    assert "did not respond within 0.3 s" in str(found[there[0]])


def test_a_rank_that_comes_late_learns_that_it_is_late(store: dist.Store) -> None:
    with pytest.raises(RanksMissing):
        exchange_with_rank_0("k", 0, 2, 0, sum, timeout=0.1)
    with pytest.raises(RanksMissing) as caught:
        exchange_with_rank_0("k", 1, 2, 1, sum, timeout=5)
    assert caught.value.ranks == (1,)


def test_nobody_waits_for_ever_for_a_rank_0_that_died(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_exchange, "JUDGING", 0.1)
    store.set("k/here", "1")
    with pytest.raises(RanksMissing) as caught:
        exchange_with_rank_0("k", 1, 2, 1, sum, timeout=0.1)
    assert caught.value.ranks == (0,)
