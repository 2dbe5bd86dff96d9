"""How long collectives take: the α–β model, where a message of m bytes takes α + m·β seconds.

α is the latency of the interconnect and β the inverse of its bandwidth. Reductions are taken to be free: adding runs at memory
speed, which is far above that of any interconnect. Sources:

- Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (IJHPCA 19(1), 2005): ring,
  recursive doubling and halving, pairwise exchange, Bruck's algorithm, and reduce_scatter followed by all_gather.
- Chan, Heimlich, Purkayastha, van de Geijn: Collective communication: theory, practice, and experience (Concurrency and
  Computation 19(13), 2007): the bounds of rooted collectives, and the minimum spanning trees that reach them.
- The performance notes of nccl-tests (doc/PERFORMANCE.md): 2·(p − 1)/p of the data cross a rank's link in an all_reduce,
  (p − 1)/p in an all_gather or a reduce_scatter, whatever the algorithm.

Below, p is the number of members, n the bytes named in each docstring, and lg the binary logarithm. On a full mesh a rank
talks to all its peers at once, each over a link of its own, so that the direct forms take one step.
"""

from __future__ import annotations

from collections.abc import Callable

from tcverify.cost.device import Interconnect
from tcverify.errors import InternalError


def collective_time(kind: str, contribution: float, members: int, interconnect: Interconnect) -> float:
    """Return the seconds that a collective takes by the fastest of its algorithms.

    Args:
        kind: as in `ops.Collective`: "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "broadcast",
            "gather", "scatter", "reduce", "send_recv" or "reshard"; or "one_shot_all_reduce", which leaves no choice of
            algorithm.
        contribution: bytes that each member contributes, and of scatter, that each gets; of members that contribute differently
            (all_to_all), this one.
        members: how many ranks take part. One rank alone needs no time.
        interconnect: what connects them; see `DeviceProfile.between`.
    """
    if members < 2:
        return 0.0
    return min(algorithm_times(kind, contribution, members, interconnect).values())


def algorithm_times(kind: str, contribution: float, members: int, interconnect: Interconnect) -> dict[str, float]:
    """Return the seconds of every algorithm of a collective by its name ("ring", "doubling", …). See `collective_time`.

    Raises:
        InternalError: there is no such kind.
    """
    try:
        times = _TIMES[kind]
    except KeyError:
        raise InternalError(f"no time model of the collective '{kind}'") from None
    # More members than the mesh has positions are not all neighbours, whatever the caller claims.
    direct = interconnect.topology == "full_mesh" and members <= interconnect.size
    bandwidth = interconnect.link_bandwidth if direct else interconnect.effective_bandwidth
    return times(contribution, members, interconnect.latency_s, 1 / bandwidth, direct)


def _send_recv(n: float, p: int, latency: float, beta: float, direct: bool) -> dict[str, float]:
    """One message of n bytes: α + nβ. The messages of a permute go side by side, each over links of its own sender and receiver.
    How long a reshard takes is known once communications have been chosen for it; no less than one message."""
    return {"direct": latency + n * beta}


def _all_gather(n: float, p: int, latency: float, beta: float, direct: bool) -> dict[str, float]:
    """n bytes from every member to every member.

    ring: (p − 1)(α + nβ). doubling, for powers of two: lg p · α + (p − 1)nβ. direct, on a full mesh: α + nβ.
    """
    if direct:
        return {"direct": latency + n * beta}
    times = {"ring": (p - 1) * (latency + n * beta)}
    if _is_power_of_two(p):
        times["doubling"] = _lg(p) * latency + (p - 1) * n * beta
    return times


def _reduce_scatter(n: float, p: int, latency: float, beta: float, direct: bool) -> dict[str, float]:
    """n bytes in, n/p bytes out: an all_gather of n/p bytes run backwards, with halving in place of doubling."""
    names = {"doubling": "halving"}
    return {names.get(name, name): time for name, time in _all_gather(n / p, p, latency, beta, direct).items()}


def _all_reduce(n: float, p: int, latency: float, beta: float, direct: bool) -> dict[str, float]:
    """n bytes in and out.

    ring: 2(p − 1)(α + nβ/p), that is a reduce_scatter and an all_gather; "halving" likewise (Rabenseifner's algorithm) and
    "direct" on a full mesh: 2(α + nβ/p). doubling: lg p · (α + nβ); where p is not a power of two, the members beyond the
    largest power of two below p first fold their data into another's and are sent the result at the end: 2(α + nβ) more.
    one-shot, on a full mesh: everyone sends everything to everyone: α + nβ.
    """
    scattered = _reduce_scatter(n, p, latency, beta, direct)
    gathered = list(_all_gather(n / p, p, latency, beta, direct).values())
    times = {name: first + second for (name, first), second in zip(scattered.items(), gathered, strict=True)}
    if direct:
        times["one-shot"] = latency + n * beta
    else:
        steps = _lg(p) + (0 if _is_power_of_two(p) else 2)
        times["doubling"] = steps * (latency + n * beta)
    return times


def _all_to_all(n: float, p: int, latency: float, beta: float, direct: bool) -> dict[str, float]:
    """n/p of the n bytes of each member to each member.

    pairwise: (p − 1)(α + nβ/p). bruck: ⌈lg p⌉(α + nβ/2), for short messages. direct, on a full mesh: α + nβ/p.
    """
    if direct:
        return {"direct": latency + n / p * beta}
    return {
        "pairwise": (p - 1) * (latency + n / p * beta),
        "bruck": _steps(p) * (latency + n / 2 * beta),
    }


def _broadcast(n: float, p: int, latency: float, beta: float, direct: bool) -> dict[str, float]:
    """n bytes from one member to all others.

    tree: ⌈lg p⌉(α + nβ), for short messages. scattered: n/p bytes to each and an all_gather of them (van de Geijn's algorithm),
    for long ones: the scatter takes ⌈lg p⌉α + (p − 1)/p · nβ. direct, on a full mesh: α + nβ.
    """
    if direct:
        return {"direct": latency + n * beta}
    steps = _steps(p)
    gathered = min(_all_gather(n / p, p, latency, beta, direct).values())
    return {
        "tree": steps * (latency + n * beta),
        "scattered": steps * latency + (p - 1) / p * n * beta + gathered,
    }


def _gather(n: float, p: int, latency: float, beta: float, direct: bool) -> dict[str, float]:
    """n bytes from every member to one of them; a scatter is the same run backwards.

    tree: ⌈lg p⌉α + (p − 1)nβ: in step k what 2ᵏ members have is sent on, and all but its own crosses the root's link. direct,
    on a full mesh: α + nβ.
    """
    if direct:
        return {"direct": latency + n * beta}
    return {"tree": _steps(p) * latency + (p - 1) * n * beta}


def _reduce(n: float, p: int, latency: float, beta: float, direct: bool) -> dict[str, float]:
    """n bytes from every member, reduced, to one of them.

    tree: ⌈lg p⌉(α + nβ), for short messages. scattered: a reduce_scatter and a gather of n/p bytes (Rabenseifner's algorithm),
    for long ones. direct, on a full mesh: α + nβ.
    """
    if direct:
        return {"direct": latency + n * beta}
    scattered = min(_reduce_scatter(n, p, latency, beta, direct).values())
    gathered = min(_gather(n / p, p, latency, beta, direct).values())
    return {"tree": _steps(p) * (latency + n * beta), "scattered": scattered + gathered}


def _one_shot_all_reduce(n: float, p: int, latency: float, beta: float, direct: bool) -> dict[str, float]:
    """Every member reads the n bytes of every other: α + (p − 1)nβ, on a full mesh side by side: α + nβ."""
    return {"one-shot": latency + (1 if direct else p - 1) * n * beta}


_TIMES: dict[str, Callable[[float, int, float, float, bool], dict[str, float]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _send_recv,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _gather,
    "reduce": _reduce,
    "send_recv": _send_recv,
    "reshard": _send_recv,
    "one_shot_all_reduce": _one_shot_all_reduce,
}


def _is_power_of_two(p: int) -> bool:
    return p & (p - 1) == 0


def _steps(p: int) -> int:
    """⌈lg p⌉."""
    return (p - 1).bit_length()


def _lg(p: int) -> int:
    """⌊lg p⌋."""
    return p.bit_length() - 1
