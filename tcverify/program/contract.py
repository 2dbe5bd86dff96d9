"""Contract: what a pass promises besides preserving the meaning of the program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from tcverify.errors import UsageError

#: Which streams the caller waits for before it reads outputs: stream 0 ("strict") or all ("lenient").
Boundary: TypeAlias = Literal["strict", "lenient"]
#: Where inputs are written before the graph begins.
InputsReady: TypeAlias = Literal["ready", "stream0"]
#: Where asynchronous collectives may block: only at their wait ("functional"), or at their start as well.
Blocking: TypeAlias = Literal["functional", "conservative"]

#: Promises that are words, with the allowed words; all others except numbers are true or false.
_WORDS: dict[str, tuple[str, ...]] = {
    "boundary": get_args(Boundary),
    "inputs": get_args(InputsReady),
    "collectives": get_args(Blocking),
}
#: Promises that are numbers of at least 0, or None for no promise.
_NUMBERS = ("memory_budget", "streams")


@dataclass(frozen=True, slots=True)
class Contract:
    """Promises of a pass. The defaults cause no false alarms for passes that promise nothing.

    Attributes:
        idempotent: a second application changes nothing.
        metadata: inserted and changed nodes carry correct `meta["val"]`. If a pass promises it, wrong metadata is an error;
            without a promise, hygiene. False: a later step propagates metadata again, and none is checked.
        strict: hygiene findings count as errors.
        identity: the pass never changes anything; a campaign then does not expect changes.
        schedule: a graph that the pass lowers to streams carries what its schedule predicts (`meta["schedule"]` of the output
            node), which its replay confirms and which beats sequential execution.
        overlap: communication is exposed (in flight while nothing computes) for no longer than before the pass, as far as costs
            of ops are known.
        order: the pass only moves nodes, and preserves every dependency: of data, of writes, of effects, and those that
            `meta["after"]` declares.
        collective_order: the collectives of each communicator, and all ops with effects, keep their order.
        memory_budget: peak memory grows by at most this share of what it was before the pass.
        collectives: "functional" means that asynchronous collectives block at their wait, "conservative" that they may block
            where they start.
        lowered: no op that changes layouts is left, and no stream axis.
        deallocation: the graph frees each of its values once, including unused ones, except inputs and outputs.
        streams: worker streams have indices below this number, and at the end the caller's stream is current again.
        boundary: of graphs lowered to streams: "strict" means that outputs are read on stream 0, "lenient" that the caller waits
            for all streams.
        inputs: of graphs lowered to streams: "ready" on all streams when the graph begins, or written on "stream0" before.

    Raises:
        UsageError: a promise has an invalid value.
    """

    idempotent: bool = False
    metadata: bool | None = None
    strict: bool = False
    identity: bool = False
    schedule: bool = False
    overlap: bool = False
    order: bool = False
    collective_order: bool = False
    memory_budget: float | None = None
    lowered: bool = False
    deallocation: bool = False
    streams: int | None = None
    collectives: Blocking = "functional"
    boundary: Boundary = "strict"
    inputs: InputsReady = "ready"

    def __post_init__(self) -> None:
        for name, value in ((f.name, getattr(self, f.name)) for f in fields(self)):
            if name in _NUMBERS:
                number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
                if value is not None and not number:
                    raise UsageError(f"the promise {name} is {str(value)[:60]!r}", "use a number that is at least 0")
                continue
            words = _WORDS.get(name, (True, False))
            if name == "metadata" and value is None:
                continue
            if value not in words or type(value) is not type(words[0]):
                written = " or ".join(str(word).lower() for word in words)
                raise UsageError(f"the promise {name} is {str(value)[:60]!r}", f"use {written}")

    @classmethod
    def of(cls, promises: Mapping[str, Any]) -> Contract:
        """Create a contract from promises by name. Raises `UsageError` for unknown ones and invalid values."""
        known = {f.name for f in fields(cls)}
        for name in promises:
            if name not in known:
                raise UsageError(f"'{name}' is not a promise of a contract", f"promises are {', '.join(sorted(known))}")
        return cls(**promises)

    def with_options(self, options: Mapping[str, str]) -> Contract:
        """Return the contract with `k=v` options applied. Raises `UsageError` as `of` does."""
        known = {f.name for f in fields(self)}
        changes: dict[str, Any] = {}
        for key, value in options.items():
            if key not in known:
                raise UsageError(f"'{key}' is not a promise of a contract", f"promises are {', '.join(sorted(known))}")
            if key in _NUMBERS:
                changes[key] = _number(key, value)
                continue
            words = _WORDS.get(key)
            if words is None and value.lower() not in ("true", "false"):
                raise UsageError(f"--contract {key}={value}: the value is not true or false")
            if words is not None and value.lower() not in words:
                raise UsageError(f"--contract {key}={value}: the value is not {' or '.join(words)}")
            changes[key] = value.lower() == "true" if words is None else value.lower()
        return replace(self, **changes)


def _number(key: str, text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--contract {key}={text}: the value is not a number") from None
