"""Patterns: whether a program contains what another one does. Tells programs that show a known cause from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from tcverify.ops import TensorSpec, qualified_name
from tcverify.ops.leaves import leaves
from tcverify.program import Program

#: Places that are tried for a pattern before it counts as not contained.
MOST_STEPS = 2_000


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a pattern.

    Attributes:
        label: its op, and how many dims its result has.
        operands: by place among the operands, the number of the call that is read there; calls of a pattern alone.
        readers: in how many places it is read or returned.
    """

    label: tuple[str, int]
    operands: tuple[tuple[int, int], ...]
    readers: int


class ProgramPattern:
    """The calls of a program: which op reads which one where. Inputs, numbers and sizes stand for any.

    A program contains it where each of its calls has a call of the same op that reads the counterparts of what it reads, and that
    is read as often, at least.
    """

    def __init__(self, program: Program) -> None:
        self._calls = _calls(program.graphs[0])
        self._counts = Counter(call.label for call in self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def within(self, other: ProgramPattern) -> bool:
        """Whether another pattern contains it."""
        if any(other._counts[label] < count for label, count in self._counts.items()):
            return False
        places: dict[tuple[str, int], list[int]] = {}
        for number, call in enumerate(other._calls):
            places.setdefault(call.label, []).append(number)
        self._left = MOST_STEPS
        return any(True for _ in self._matches(other, places, ()))

    def _matches(
        self, other: ProgramPattern, places: dict[tuple[str, int], list[int]], chosen: tuple[int, ...]
    ) -> Iterator[None]:
        if len(chosen) == len(self._calls):
            yield None
            return
        call = self._calls[len(chosen)]
        for number in places[call.label]:
            self._left -= 1
            if self._left < 0:
                return
            there = other._calls[number]
            reads = dict(there.operands)
            if number in chosen or there.readers < call.readers:
                continue
            if all(reads.get(place) == chosen[operand] for place, operand in call.operands):
                yield from self._matches(other, places, (*chosen, number))


def _calls(graph: fx.Graph) -> list[_Call]:
    numbers: dict[fx.Node, int] = {}
    found: list[_Call] = []
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        operands = leaves((node.args, node.kwargs), fx.Node)
        reads = tuple((place, numbers[one]) for place, one in enumerate(operands) if one in numbers)
        value = node.meta.get("val")
        dims = len(value.shape) if isinstance(value, TensorSpec) else -1
        name = qualified_name(node.target) if node.op == "call_function" else str(node.target)
        readers = sum(leaves((user.args, user.kwargs), fx.Node).count(node) for user in node.users)
        numbers[node] = len(found)
        found.append(_Call((name, dims), reads, readers))
    return found


__all__ = ["ProgramPattern"]
