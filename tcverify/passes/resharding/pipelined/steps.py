"""The loop of a pipeline, unrolled: each step on a separate stream.

A separate loop lets every worker wait for the caller's stream, so that no worker waits for another; then each step sets its
stream, communicates and computes, and the caller's stream waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import fx

from tcverify.passes.resharding.writing import HostWriter


@dataclass(frozen=True, slots=True)
class StepStreams:
    """On which streams steps run.

    Attributes:
        number: of worker streams.
        sync: whether each step waits for what is queued on the stream of the one before it.
    """

    number: int
    sync: bool = False


class Loop:
    """The steps of one pipeline: step i on worker stream i mod n. To be made where the caller's stream is current."""

    def __init__(self, writer: HostWriter, streams: StepStreams, steps: int) -> None:
        self._writer, self._streams = writer, streams
        self._steps = iter(range(steps))
        self._caller = writer.current_stream()
        self._workers = [writer.stream(index) for index in range(min(streams.number, steps))]

    def begin(self) -> None:
        """Let every worker wait for what the caller's stream has queued."""
        for worker in self._workers:
            self._writer.set_stream(worker)
            self._writer.synchronize(self._caller)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run what the block writes on the next worker, and let the caller's stream, which is current again, wait for it."""
        number, count = next(self._steps), len(self._workers)
        worker = self._workers[number % count]
        self._writer.set_stream(worker)
        if self._streams.sync and number and count > 1:
            self._writer.synchronize(self._workers[(number - 1) % count])
        yield
        self._writer.set_stream(self._caller)
        self._writer.synchronize(worker)


def select(writer: HostWriter, x: fx.Node, *indices: int) -> fx.Node:
    """x[i][j]…"""
    for index in indices:
        x = writer.call("aten::select.int", x, 0, index)
    return x


def copy(writer: HostWriter, into: fx.Node, value: fx.Node) -> None:
    writer.call("aten::copy_", into, value)


def shifted_targets(size: int, by: int) -> list[int]:
    """Where each position of a team sends to."""
    return [(position + by) % size for position in range(size)]


__all__ = ["Loop", "StepStreams", "copy", "select", "shifted_targets"]
