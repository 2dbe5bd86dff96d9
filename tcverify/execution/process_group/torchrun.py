"""Process groups whose ranks torchrun has started, on one machine or on several.

Every process that torchrun starts is a keeper (see `torchrun_keeper`): it starts one rank of each group, ends it, and relays
its messages. Campaign and keepers communicate through torchrun's store, in the messages of `messages`: JSON, and bytes
of tensors. The campaign runs next to the keeper of rank 0 and finds the store by the environment.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist

from tcverify.errors import ExecutorError, UsageError
from tcverify.execution.process_group.messages import Reply, decode_reply
from tcverify.execution.process_group.processes import START_SECONDS, RankLost, name_ranks
from tcverify.execution.process_group.worker import DeviceType
from tcverify.registry.extensions import extensions_here, loaded_extensions

#: A store of torch.distributed, whose name is not exported for type checkers.
Store: TypeAlias = Any

#: The variable that tells a campaign where its keepers are.
VARIABLE = "TCVERIFY_TORCHRUN"

_TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]
_PREFIX_STORE: Any = dist.PrefixStore  # type: ignore[attr-defined]

#: Bytes of one entry of the store, which takes no more than 8 MiB.
PIECE = 4 << 20

#: Seconds that the store itself may take.
STORE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a run's store is, and how many keepers there are.

    Attributes:
        prefix: of all keys of this run; a restart has another one.
    """

    host: str
    port: int
    prefix: str
    world_size: int

    def connect(self, *, master: bool = False) -> Store:
        """Return a separate connection: two threads that share one block each other.

        Raises:
            ExecutorError: there is no answer.
        """
        try:
            patience = timedelta(seconds=STORE_SECONDS)
            store = _TCP_STORE(self.host, self.port, is_master=master, timeout=patience, wait_for_workers=False)
        except Exception as error:  # whatever the transport raises
            raise ExecutorError(f"the store of torchrun at {self.host}:{self.port} does not answer: {error}") from error
        return _PREFIX_STORE(self.prefix, store)

    def dumps(self) -> str:
        """Write it for `VARIABLE`."""
        return json.dumps(asdict(self))

    @classmethod
    def here(cls) -> StoreAddress:
        """Return the place that `VARIABLE` names. Raises UsageError where it is not set."""
        text = os.environ.get(VARIABLE)
        if text is None:
            raise UsageError("there is no torchrun here", "start it as torchrun … -m tcverify worker run …")
        return cls(**json.loads(text))


class Channel:
    """Messages in order, from any number of writers to one reader, as entries of a store that the reader removes."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._read = 0

    def put(self, message: bytes) -> None:
        """Add a message."""
        pieces = [message[i : i + PIECE] for i in range(0, len(message), PIECE)]
        number = self._store.add(self._name, 1)
        key = f"{self._name}/{number}"
        for i, piece in enumerate(pieces):
            self._store.set(f"{key}/{i}", piece)
        self._store.set(key, str(len(pieces)))

    def get(self, seconds: float) -> bytes | None:
        """Return the next message, or None if there is none within this many seconds."""
        key = f"{self._name}/{self._read + 1}"
        try:
            self._store.wait([key], timedelta(seconds=max(0.001, seconds)))
        except dist.DistStoreError:
            return None
        self._read += 1
        count = int(self._store.get(key))
        message = b"".join(self._store.get(f"{key}/{i}") for i in range(count))
        for entry in (key, *(f"{key}/{i}" for i in range(count))):
            self._store.delete_key(entry)
        return message


class StoreGroup:
    """The ranks of one group, seen from the campaign: like `RankGroup`, but keepers start and end them.

    Args:
        timeout: not used: a keeper always accepts messages, whatever its rank does.

    Raises:
        ExecutorError: the group cannot be started.
        UsageError: there is no torchrun here, or it has started fewer ranks.
    """

    def __init__(self, world_size: int, device: DeviceType, core: int | None, timeout: float) -> None:
        place = StoreAddress.here()
        if world_size > place.world_size:
            raise ExecutorError(f"torchrun has started {place.world_size} processes, fewer than {world_size} ranks")
        self.extensions = loaded_extensions()
        self.pids: list[int] = []  # on the machines of the ranks
        self._store = place.connect()
        self._world_size = world_size
        self._number = self._store.add("groups", 1)
        self._heard = Channel(self._store, f"group/{self._number}/said")
        self._told = [Channel(self._store, f"group/{self._number}/told/{rank}") for rank in range(world_size)]
        self._keepers = [Channel(self._store, f"keeper/{rank}") for rank in range(world_size)]
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._heads: dict[int, dict[str, Any]] = {}  # first messages whose second one is on its way
        self._lost: RankLost | None = None
        order = {"start": self._number, "world_size": world_size, "device": device, "directory": str(Path.cwd())}
        for keeper in self._keepers:
            keeper.put(json.dumps({**order, "extensions": extensions_here()}).encode())
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        missing = set(range(self._world_size))
        pids: dict[int, int] = {}
        while missing:
            self._listen(deadline)
            if self._waiting:
                rank, message = self._waiting.popleft()
                answer = json.loads(message)
                if "failed" in answer:
                    raise ExecutorError(f"rank {rank} cannot join the process group: {answer['failed']}")
                missing.discard(rank)
                pids[rank] = answer["pid"]
            elif self._lost is not None:
                raise ExecutorError(f"rank {self._lost.rank} {self._lost.how} while the process group was being set up")
            elif time.monotonic() >= deadline:
                raise ExecutorError(f"{name_ranks(missing)} did not join the process group in {START_SECONDS:g} s")
        self.pids = [pids[rank] for rank in sorted(pids)]

    def send(self, rank: int, message: bytes) -> None:
        """See `RankGroup.send`."""
        self._told[rank].put(message)

    def receive(self, deadline: float) -> tuple[int, Reply] | None:
        """See `RankGroup.receive`."""
        while True:
            while self._waiting:
                rank, message = self._waiting.popleft()
                head = self._heads.pop(rank, None)
                if head is not None:
                    return rank, decode_reply(rank, head, message)
                data = json.loads(message)
                if "storages" not in data:
                    return rank, decode_reply(rank, data, b"")
                self._heads[rank] = data
            if self._lost is not None:
                raise self._lost
            if not self._listen(deadline):
                return None

    def lost(self, seconds: float) -> RankLost | None:
        """See `RankGroup.lost`."""
        deadline = time.monotonic() + seconds
        while self._lost is None and self._listen(deadline):
            pass
        return self._lost

    def kill(self) -> None:
        """Have the keepers end the ranks."""
        for keeper in self._keepers:
            keeper.put(json.dumps({"end": self._number}).encode())

    def _listen(self, deadline: float) -> bool:
        """Take in one thing that a keeper says; whether there was one before `deadline` (monotonic clock)."""
        said = self._heard.get(deadline - time.monotonic())
        if said is None:
            return False
        head, _, message = said.partition(b"\n")
        told = json.loads(head)
        if "lost" in told:
            self._lost = self._lost or RankLost(told["rank"], told["lost"])
        else:
            self._waiting.append((told["rank"], message))
        return True


__all__ = ["VARIABLE", "Channel", "StoreAddress", "StoreGroup"]
