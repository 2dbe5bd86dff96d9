"""Process groups for passes that query c10d about the groups of a graph: fake ones, created for every rank."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import fx
from torch.distributed import distributed_c10d as c10d

from tcverify.errors import Unsupported
from tcverify.ops import Group

#: Used, and never waited for.
_TIMEOUT = datetime.timedelta(minutes=1)


@contextlib.contextmanager
def groups_of(gm: fx.GraphModule) -> Iterator[None]:
    """Act as the rank of a graph, with process groups of the names that the graph uses.

    Collectives on them do nothing and return at once. Groups of the process are hidden in the meantime.

    Raises:
        Unsupported: the module does not say which rank it is for.
    """
    if "world_size" not in gm.meta:
        raise Unsupported("the graph does not say for which rank it is")
    rank, size = gm.meta["rank"], gm.meta["world_size"]
    with fake_groups(rank, size, gm.meta["groups"]):
        yield


@contextlib.contextmanager
def fake_groups(rank: int, world_size: int, groups: dict[str, tuple[int, ...]]) -> Iterator[None]:
    """Be a rank of a world, with process groups of these names and members (in group order, `rank` among them)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():  # a user's script that verifies while it uses its own process group
        raise Unsupported("this process belongs to a process group already")
    store, hook = FakeStore(), sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    try:
        for name, members in groups.items():
            _make(name, members, rank, store)
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # c10d has put one in its place that marks every line with a rank


def known_groups() -> dict[str, Group]:
    """The process groups of this process by name, as groups that ops are given."""
    ranks = c10d._world.pg_group_ranks
    return {name: Group(name, tuple(ranks[group])) for group, name in c10d._world.pg_names.items()}


def _make(name: str, members: tuple[int, ...], rank: int, store: Any) -> None:
    """Make a group of this name. `new_group` would choose one, and sort the members."""
    make: Any = c10d._new_process_group_helper
    made = make(
        len(members), members.index(rank), list(members), "fake", store, name,
        timeout=_TIMEOUT, group_desc=f"mesh_{name}",
    )  # fmt: skip
    group = made[0] if isinstance(made, tuple) else made
    c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(members)}


__all__ = ["fake_groups", "groups_of", "known_groups"]
