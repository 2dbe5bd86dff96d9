"""Stream settings for a compiler: data that belongs to a program."""

from __future__ import annotations

from dataclasses import dataclass

from tcverify.errors import ProgramError

#: Stream on which outputs are read.
MAIN_STREAM = 0
#: Limits on the number of stream ids of one role, and on their values: more is a mistake.
MAX_STREAMS = 64
MAX_STREAM_ID = 1 << 16


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The streams that a scheduling pass may use; it finds them in `gm.meta["streams"]`.

    Attributes:
        compute: ids of the streams for compute, and for fused ops that compute and communicate.
        comm: ids of the streams for communication.
        sync_overhead_s: seconds from the end of an op until an op of another stream that waits for it can start.
        device: name of a device profile, for ops whose cost is not given (`meta["cost_s"]`); None without a profile.

    Raises:
        ProgramError: no stream for a role, a stream named twice, a negative id or time.
    """

    compute: tuple[int, ...] = (0,)
    comm: tuple[int, ...] = (1,)
    sync_overhead_s: float = 0.0
    device: str | None = None

    def __post_init__(self) -> None:
        for role, ids in (("compute", self.compute), ("comm", self.comm)):
            if not isinstance(ids, tuple):
                raise ProgramError(f"the {role} streams are {ids!r}, no tuple of numbers")
            if not 0 < len(ids) <= MAX_STREAMS or len(set(ids)) != len(ids):
                raise ProgramError(f"the {role} streams {list(ids)} are none, too many, or name one twice")
            if any(type(i) is not int or not 0 <= i <= MAX_STREAM_ID for i in ids):
                raise ProgramError(f"the {role} streams {list(ids)} are not all numbers from 0 to {MAX_STREAM_ID}")
        overhead = self.sync_overhead_s
        if type(overhead) not in (int, float) or not 0 <= overhead < 1e6:
            raise ProgramError(f"a synchronisation overhead of {str(overhead)[:40]} s is not a time")
        if self.device is not None and not isinstance(self.device, str):
            raise ProgramError(f"the device {self.device!r} is not the name of a device profile")
