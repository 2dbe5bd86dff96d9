"""How long nodes take, for passes that decide by time; the same on all ranks where they ask for it."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from tcverify.cost import DeviceProfile, node_cost, takes_no_time
from tcverify.cost import load_device_profile as device_profile
from tcverify.errors import UsageError
from tcverify.passes.overlap.graph import CommGraph
from tcverify.program.stream_options import StreamSettings

log = logging.getLogger(__name__)

#: Seconds per node of a graph.
Runtimes = Mapping[fx.Node, float]
#: Gives every rank's list for this rank's list, in the order of ranks.
Gather = Callable[[list[float]], Sequence[Sequence[float]]]


def runtimes(found: CommGraph, device: DeviceProfile | None = None) -> dict[fx.Node, float] | None:
    """Return the seconds that every node takes: of a start, the time of its communication; of waits and free nodes 0.

    Args:
        device: for nodes without `meta["cost_s"]`; unless given, the one that the program names (`gm.meta["streams"].device`).

    Returns:
        Seconds; times in the metadata of nodes (`meta["cost_s"]`) are unchanged, however short. None if some node that takes time
        has no cost, and no device is known to estimate it for.
    """
    if device is None:
        device = _device(found)
    owner = found.nodes[0].graph.owning_module if found.nodes else None
    groups: Mapping[str, Sequence[int]] = getattr(owner, "meta", {}).get("groups") or {}
    times: dict[fx.Node, float] = {}
    for node in found.nodes:
        if found.kind(node) in ("wait", "free") or takes_no_time(node):
            times[node] = 0.0
            continue
        given = node.meta.get("cost_s")
        if given is not None and not _is_time(given):
            log.info("times are not known: the cost of '%s' is %s, which is not a time", node.name, str(given)[:40])
            return None
        cost = node_cost(node, device, groups=groups) if given is None else float(given)
        if cost is None:
            log.info("times are not known: '%s' has no cost, and there is no device to estimate it for", node.name)
            return None
        times[node] = cost
    return times


def agree_on_runtimes(
    found: CommGraph, times: dict[fx.Node, float] | None, *, align: bool, gather: Gather | None = None
) -> dict[fx.Node, float] | None:
    """Return the times by which a pass decides that asks for times at all.

    If ranks do not align theirs, they may decide differently, this one by its times and others without any. Then ranks must not
    rely on running the same graph any more: the module no longer says so (`meta["alike"]`).

    Args:
        align, gather: see `align_runtimes`.
    """
    owner = found.nodes[0].graph.owning_module if found.nodes else None
    if not (align and (gather is not None or _many())) and owner is not None and "alike" in owner.meta:
        owner.meta["alike"] = ()
    return align_runtimes(times, gather) if align else times


def align_runtimes(times: Runtimes | None, gather: Gather | None = None) -> dict[fx.Node, float] | None:
    """Return the median over ranks of the time of every node, so that ranks that measure or estimate differently decide alike.

    All ranks must call this, for graphs with the same nodes in the same order.

    Args:
        times: this rank's times, in the order of its graph.
        gather: gives every rank's list for this rank's; by default, `torch.distributed.all_gather_object` on the default group
            where that is initialised, else this rank's list alone.

    Returns:
        The medians; None if some rank knows no times; this rank's own times, with a line in the log, if ranks have different
        numbers of nodes.
    """
    own = [] if times is None else list(times.values())
    every = (gather or _gathered)(own)
    if times is None or not all(every):
        log.info("times are not known on all ranks")
        return None
    if any(len(theirs) != len(own) for theirs in every):
        log.warning("times are not aligned: graphs of %s nodes on the ranks", sorted({len(theirs) for theirs in every}))
        return dict(times)
    return {node: float(statistics.median(of)) for node, of in zip(times, zip(*every, strict=True), strict=True)}


def _gathered(own: list[float]) -> list[list[float]]:
    if not _many():
        return [own]
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def _many() -> bool:
    """Whether there are other ranks to ask."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _device(found: CommGraph) -> DeviceProfile | None:
    """The device that the program names, if it is known."""
    owner = found.nodes[0].graph.owning_module if found.nodes else None
    settings = getattr(owner, "meta", {}).get("streams")
    name = settings.device if isinstance(settings, StreamSettings) else None
    if name is None:
        return None
    try:
        return device_profile(name)
    except UsageError as error:
        log.info("the program names a device that is not known: %s", error.message)
        return None


#: Seconds that no node takes: beyond them, sums of times stop being numbers.
_TOO_LONG_S = 1e100


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _TOO_LONG_S


__all__ = ["Gather", "Runtimes", "agree_on_runtimes", "align_runtimes", "runtimes"]
