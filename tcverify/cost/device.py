"""Device profiles: what a time model needs to know about a machine. Data only; the devices themselves are in `profiles`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from tcverify.errors import UsageError

Topology = Literal["clos", "full_mesh"]
TOPOLOGIES: tuple[Topology, ...] = ("clos", "full_mesh")


@dataclass(frozen=True, slots=True)
class Interconnect:
    """One dim of the grid of devices: what connects the devices that differ in this coordinate alone.

    Attributes:
        name: "nvlink", "infiniband", …
        size: devices along this dim.
        topology: "clos", a switched network without oversubscription, where any one peer is reached at full bandwidth; or
            "full_mesh", with a separate link to each of the `size - 1` peers, so that one peer is reached at
            `bandwidth / (size - 1)`.
        bandwidth: bytes/s that a device sends at most, over all its links of this dim, in one direction.
        latency_s: seconds from sending the first byte to its arrival.
        efficiency: share of the bandwidth that large messages reach, in (0, 1].

    Raises:
        UsageError: a figure is invalid.
    """

    name: str
    size: int
    topology: Topology
    bandwidth: float
    latency_s: float
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        where = f"interconnect '{self.name}'"
        if self.topology not in TOPOLOGIES:
            raise UsageError(
                f"{where}: topology is {self.topology!r}, which is none", f"choose one of {', '.join(TOPOLOGIES)}"
            )
        if type(self.size) is not int or self.size < 2:
            raise UsageError(f"{where}: size is {self.size!r}, not an integer of at least 2")
        _positive(self.bandwidth, f"{where}: bandwidth", "bytes/s")
        _not_negative(self.latency_s, f"{where}: latency_s", "seconds")
        _share(self.efficiency, f"{where}: efficiency")

    @property
    def effective_bandwidth(self) -> float:
        """Bytes/s of one device over all its links of this dim."""
        return self.bandwidth * self.efficiency

    @property
    def link_bandwidth(self) -> float:
        """Bytes/s from one device to one other."""
        return self.effective_bandwidth / (self.size - 1 if self.topology == "full_mesh" else 1)


@dataclass(frozen=True, slots=True)
class LaunchCosts:
    """Seconds that each op costs before it does anything, by class of op.

    Attributes:
        matmul: matrix products and attention.
        vector: everything else that computes.
        comm: collectives, and fused ops that compute and communicate.
    """

    matmul: float = 0.0
    vector: float = 0.0
    comm: float = 0.0

    def __post_init__(self) -> None:
        for name in ("matmul", "vector", "comm"):
            _not_negative(getattr(self, name), f"launch.{name}", "seconds")


@dataclass(frozen=True, eq=False)
class DeviceProfile:
    """A device and the grid of its kind that it is connected to.

    Profiles compare by identity.

    Attributes:
        name: of the profile.
        interconnects: the dims of the grid, outermost (slowest to change with the rank) first. Rank r sits at the row-major
            coordinates of r; ranks beyond the grid stand further along its outermost dim.
        matmul_flops: FLOP/s of matrix units by the dtype of the operands. A multiplication and an addition are two.
        vector_flops: FLOP/s of vector units, likewise.
        memory_bandwidth: bytes/s between the device and its memory.
        memory_bytes: size of that memory.
        compute_efficiency: share of both rates that large ops reach, in (0, 1].
        memory_efficiency: share of the memory bandwidth that large ops reach, in (0, 1].
        launch: what each op costs before it does anything.
        sources: where the figures come from, and which of them are assumptions.

    Raises:
        UsageError: a figure is none.
    """

    name: str
    interconnects: tuple[Interconnect, ...]
    matmul_flops: Mapping[torch.dtype, float]
    vector_flops: Mapping[torch.dtype, float]
    memory_bandwidth: float
    memory_bytes: int
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    launch: LaunchCosts = field(default_factory=LaunchCosts)
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.interconnects:
            raise UsageError("interconnects: a device needs one at least", "describe how the device reaches its peers")
        for field_name in ("matmul_flops", "vector_flops"):
            rates = getattr(self, field_name)
            if not rates:
                raise UsageError(f"{field_name}: no dtype has a rate", "give one at least, e.g. bfloat16 = 1e14")
            for dtype, rate in rates.items():
                _positive(rate, f"{field_name}.{str(dtype).removeprefix('torch.')}", "FLOP/s")
        _positive(self.memory_bandwidth, "memory_bandwidth", "bytes/s")
        if type(self.memory_bytes) is not int or self.memory_bytes < 1:
            raise UsageError(f"memory_bytes is {self.memory_bytes!r}, not a positive integer")
        _share(self.compute_efficiency, "compute_efficiency")
        _share(self.memory_efficiency, "memory_efficiency")

    def matmul_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s that a matrix product of this dtype reaches. A dtype without a figure runs at the slowest one given."""
        return _rate(self.matmul_flops, dtype) * self.compute_efficiency

    def vector_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s that elementwise arithmetic of this dtype reaches, likewise."""
        return _rate(self.vector_flops, dtype) * self.compute_efficiency

    @property
    def memory_rate(self) -> float:
        """Bytes/s that ops reach between device and memory."""
        return self.memory_bandwidth * self.memory_efficiency

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where `rank` sits in the grid."""
        found = []
        for dim in reversed(self.interconnects[1:]):
            rank, position = divmod(rank, dim.size)
            found.append(position)
        return rank, *reversed(found)

    def between(self, ranks: Sequence[int]) -> Interconnect | None:
        """Return what limits the traffic between `ranks`: the slowest of the interconnects that they span; None for one rank.

        An interconnect is spanned when coordinates of the ranks differ along its dim; the slowest has the least bandwidth
        per device, and of several with the least, the greatest latency. Ranks that span several dims are not all neighbours
        in any one of them: a full mesh then counts as a switched network of its bandwidth.
        """
        places = [self.coordinates(rank) for rank in ranks]
        spanned = [dim for i, dim in enumerate(self.interconnects) if any(place[i] != places[0][i] for place in places)]
        if not spanned:
            return None
        slowest = min(spanned, key=lambda dim: (dim.effective_bandwidth, -dim.latency_s))
        return slowest if len(spanned) == 1 else replace(slowest, topology="clos")


def _rate(rates: Mapping[torch.dtype, float], dtype: torch.dtype) -> float:
    found = rates.get(dtype)
    return min(rates.values()) if found is None else found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: Any, where: str, unit: str) -> None:
    if not _is_number(value) or value <= 0:
        raise UsageError(f"{where} is {value!r}, not a positive number of {unit}")


def _not_negative(value: Any, where: str, unit: str) -> None:
    if not _is_number(value) or value < 0:
        raise UsageError(f"{where} is {value!r}, not a number of {unit}")


def _share(value: Any, where: str) -> None:
    if not _is_number(value) or not 0 < value <= 1:
        raise UsageError(f"{where} is {value!r}, not a share above 0 and up to 1")
