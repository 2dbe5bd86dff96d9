"""An asynchronous program on its way: calls in the order in which they run, typed on every rank, with what is under way.

Unlike a draft, a script is written in order: what a call writes into, and what is under way while it runs, depends on its
place. Every call is checked against that, so that what is written is free of races by construction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx.node import map_aggregate

from tcverify.ops import ShapeError, TensorSpec, infer, lookup, mutated, resolve, schema_of
from tcverify.ops.leaves import leaves
from tcverify.program import InputSpec, Mesh
from tcverify.program.specs import storages_of
from tcverify.strategies.transformer.draft import PerRank
from tcverify.strategies.transformer.sites import NoSite

#: Results that a call may have at most.
MOST_RESULTS = 256


@dataclass(frozen=True, slots=True)
class ScriptValue:
    """An input, or what a call makes.

    Attributes:
        number: of the input or call.
        rms: roughly, the root mean square of its elements.
    """

    number: int
    rms: float = 0.6


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A call of the script.

    Attributes:
        reads: numbers of its operands.
        only: ranks that run it; None means all. Such a call makes nothing that others read.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    only: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class ScriptFlight:
    """A collective under way: the storages that it may read, and those that it may write into."""

    reads: frozenset[int]
    writes: frozenset[int]


class Script:
    """Collects inputs and calls.

    Attributes:
        mesh: what the ranks are.
        flying: the collectives that have been started and not been waited for, by number.
        swaps: pairs of calls that change places on some ranks.
        after: (number, number): the first call names the second in `meta["after"]`.
        dead: calls that stay although nobody reads them.
        makers: the inputs and calls, by number.
        types: what each of them is on each rank: a spec, several of them, or None.
        pure: nothing may be written into, and nothing but the result of a call counts.
    """

    def __init__(self, mesh: Mesh, pure: bool = False) -> None:
        self.mesh = mesh
        self.pure = pure
        self.flying: dict[int, ScriptFlight] = {}
        self.swaps: list[tuple[int, int, frozenset[int]]] = []
        self.after: list[tuple[int, int]] = []
        self.dead: set[int] = set()
        self.makers: list[InputSpec | ScriptCall] = []
        self.types: list[tuple[Any, ...]] = []
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self.makers)

    # ------------------------------------------------------------------------------------------------------ writing

    def input(self, spec: InputSpec, rms: float) -> ScriptValue:
        """Add an input; its name gets a number where it is taken."""
        name, number = spec.name, 1
        while name in self._names:
            number += 1
            name = f"{spec.name}{number}"
        self._names.add(name)
        named = InputSpec(name, spec.shape, spec.dtype, spec.placements, spec.recipe)
        types = []
        for rank in range(self.mesh.world_size):
            plain = TensorSpec.contiguous(named.local_shape(self.mesh, rank), named.dtype)
            types.append(TensorSpec(plain.shape, plain.stride, plain.dtype, 0, self._first_storage()))
        return self._add(named, tuple(types), rms)

    def call(
        self, op: str, *args: Any, rms: float | None = None, only: frozenset[int] | None = None, **kwargs: Any
    ) -> ScriptValue:
        """Add a call of `op`. A `PerRank` in its arguments is what it is on each rank.

        Args:
            rms: of the result; by default that of the first operand.

        Raises:
            NoSite: some rank cannot run it, the members of a group would not agree, or it meets what is under way.
        """
        operands = leaves((args, kwargs), ScriptValue)
        target = resolve(op)
        if self.pure and not _is_pure(target):
            raise NoSite
        try:
            types = tuple(self._infer(rank, target, args, kwargs) for rank in range(self.mesh.world_size))
        except ShapeError:
            raise NoSite from None
        meaning = lookup(target)
        if meaning.collective and meaning.phase != "wait":
            self._require_agreement(meaning.group, target, args)
        number = len(self.makers)
        if meaning.phase == "wait":
            self._land(operands[0])
        else:
            read, written = self._touched(target, args, kwargs)
            views = not written and read.issuperset(storages_of(types[0])) and not meaning.collective
            if not views:
                self._require_quiet(read, written)
            if meaning.phase == "start":
                self.flying[number] = ScriptFlight(frozenset(read), frozenset(written.union(storages_of(types[0]))))
        made = ScriptCall(op, args, kwargs, tuple(dict.fromkeys(value.number for value in operands)), only)
        return self._add(made, types, rms if rms is not None else operands[0].rms if operands else 1.0)

    def item(self, value: ScriptValue, index: int) -> ScriptValue:
        """Select one result of several."""
        types = tuple(made[index] for made in self.types[value.number])
        return self._add(ScriptCall("getitem", (value, index), {}, (value.number,)), types, value.rms)

    def _add(self, maker: InputSpec | ScriptCall, types: tuple[Any, ...], rms: float) -> ScriptValue:
        self.makers.append(maker)
        self.types.append(types)
        return ScriptValue(len(self.makers) - 1, rms)

    def rollback(self, length: int, flying: dict[int, ScriptFlight]) -> None:
        """Return to an earlier length, at which `flying` was under way."""
        for maker in self.makers[length:]:
            if isinstance(maker, InputSpec):
                self._names.discard(maker.name)
        del self.makers[length:], self.types[length:]
        self.flying = flying
        self.swaps = [swap for swap in self.swaps if max(swap[:2]) < length]
        self.after = [pair for pair in self.after if max(pair) < length]
        self.dead = {number for number in self.dead if number < length}

    # ------------------------------------------------------------------------------------------------------- typing

    def spec(self, value: ScriptValue, rank: int = 0) -> TensorSpec:
        """What a value is on a rank. Raises NoSite for what is no tensor."""
        found = self.types[value.number][rank]
        if not isinstance(found, TensorSpec):
            raise NoSite
        return found

    def shape(self, value: ScriptValue) -> tuple[int, ...]:
        """The shape of a value. Raises NoSite where ranks differ in it."""
        shapes = {self.spec(value, rank).shape for rank in range(self.mesh.world_size)}
        if len(shapes) > 1:
            raise NoSite
        return shapes.pop()

    def elements(self, value: ScriptValue) -> int:
        """Elements on the rank that has most."""
        return max(self.spec(value, rank).numel for rank in range(self.mesh.world_size))

    def same_type(self, a: ScriptValue, b: ScriptValue) -> bool:
        """Whether two values have one shape and dtype on every rank."""
        ours, theirs = self.types[a.number], self.types[b.number]
        return all(
            isinstance(one, TensorSpec) and (one.shape, one.dtype) == (getattr(other, "shape", None), other.dtype)
            for one, other in zip(ours, theirs, strict=True)
        )

    def readable(self, value: ScriptValue) -> bool:
        """Whether nothing under way writes into the value."""
        own = set(storages_of(self.types[value.number][0]))
        return not self.pure and not any(own & flight.writes for flight in self.flying.values())

    def writable(self, value: ScriptValue) -> bool:
        """Whether nothing under way reads the value or writes into it."""
        own = set(storages_of(self.types[value.number][0]))
        return not self.pure and not any(own & (flight.writes | flight.reads) for flight in self.flying.values())

    def _first_storage(self) -> int:
        """Storages are numbered by what makes them, alike on all ranks."""
        return len(self.makers) * MOST_RESULTS

    def _infer(self, rank: int, target: Any, args: Any, kwargs: Any) -> Any:
        def known(arg: Any) -> Any:
            if isinstance(arg, ScriptValue):
                return self.types[arg.number][rank]
            return arg.of(rank) if isinstance(arg, PerRank) else arg

        fresh = itertools.count(self._first_storage()).__next__
        return infer(target, map_aggregate(args, known), dict(map_aggregate(kwargs, known)), fresh)

    def _touched(self, target: Any, args: Any, kwargs: Any) -> tuple[set[int], set[int]]:
        """The storages of the operands, and those among them that the call writes into."""
        read = {
            number
            for value in leaves((args, kwargs), ScriptValue)
            for number in storages_of(self.types[value.number][0])
        }
        values = mutated(target, args, kwargs, ScriptValue)
        return read, {number for value in values for number in storages_of(self.types[value.number][0])}

    def _require_quiet(self, read: set[int], written: set[int]) -> None:
        for flight in self.flying.values():
            if read & flight.writes or written & (flight.reads | flight.writes):
                raise NoSite

    def _land(self, value: ScriptValue) -> None:
        """The collectives that write into the storage of a value have arrived there."""
        own = set(storages_of(self.types[value.number][0]))
        left: dict[int, ScriptFlight] = {}
        for number, flight in self.flying.items():
            writes = flight.writes - own
            if writes:
                left[number] = ScriptFlight(flight.reads, writes)
        self.flying = left

    def _require_agreement(self, group: str | None, target: Any, args: Sequence[Any]) -> None:
        """Raise NoSite unless the members of each group contribute equal shapes."""
        if "all_to_all" in str(target) or not leaves(args[:1], ScriptValue):
            return
        for rank in range(self.mesh.world_size):
            over = args[-1]
            if group is not None:
                members: Iterable[int] = self.mesh.dim(over).group(rank)
            elif isinstance(over, PerRank) and isinstance(over.of(rank), list):
                members = over.of(rank)
            else:
                return  # between two ranks, whatever they are
            for value in leaves(args[:1], ScriptValue):
                if any(self.spec(value, member).shape != self.spec(value, rank).shape for member in members):
                    raise NoSite

    def calls(self) -> list[int]:
        """Numbers of the calls that all ranks run; selections of results left out."""
        found = [(n, m) for n, m in enumerate(self.makers) if isinstance(m, ScriptCall)]
        return [number for number, maker in found if maker.only is None and maker.op != "getitem"]

    def blocking(self) -> set[int]:
        """Numbers of the collectives that block and return something."""
        found = set()
        for number in self.calls():
            maker = self.makers[number]
            if isinstance(maker, ScriptCall):
                op = lookup(resolve(maker.op))
                if op.collective and op.phase is None and not op.effect:
                    found.add(number)
        return found

    # ------------------------------------------------------------------------------------------------------ reading

    def unread(self) -> list[ScriptValue]:
        """What no call that all ranks run reads, inputs and dead code left out, the newest first. Writes are no results."""
        read = {n for maker in self.makers if isinstance(maker, ScriptCall) and maker.only is None for n in maker.reads}
        found = []
        for number, maker in enumerate(self.makers):
            tensor = all(isinstance(spec, TensorSpec) for spec in self.types[number])
            if isinstance(maker, ScriptCall) and tensor and number not in read | self.dead:
                target = None if maker.op == "getitem" else resolve(maker.op)
                schema = None if target is None else schema_of(target)
                if schema is None or not schema.is_mutable or maker.op.endswith("wait_tensor"):
                    found.append(ScriptValue(number))
        return found[::-1]

    def sent_by_some(self) -> list[ScriptValue]:
        """What only some ranks read: it must live on the others too, or they would drop what makes it."""
        calls = [maker for maker in self.makers if isinstance(maker, ScriptCall) and maker.only is not None]
        return [ScriptValue(number) for number in dict.fromkeys(n for call in calls for n in call.reads)]


def _is_pure(target: Any) -> bool:
    """Whether a compiler has the op in graphs without writes."""
    meaning = lookup(target)
    if meaning.phase == "wait":
        return True
    schema = schema_of(target)
    blocks = meaning.collective and meaning.phase is None
    return not (meaning.effect or blocks or schema is None or schema.is_mutable)


__all__ = ["Script", "ScriptCall", "ScriptFlight", "ScriptValue"]
