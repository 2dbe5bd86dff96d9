"""Blame: which of a pass's rewrites is wrong. Data only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One of the rewrites that a pass made.

    Attributes:
        number: its position among them, from 1.
        pattern: its name in the pass, or "" if the pass gives none.
        node: the name of its first node, or "".
        nodes: names of the nodes that it changes, as far as known.
    """

    number: int
    pattern: str = ""
    node: str = ""
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"node '{self.node}'" if self.node else ""
        return f"{self.pattern} at {where}" if self.pattern and where else self.pattern or f"at {where or 'no node'}"


@dataclass(frozen=True, slots=True)
class Blame:
    """A minimal set of rewrites that shows a finding.

    Attributes:
        rewrites: those to blame; empty if unknown.
        total: how many the pass made.
        asked: whether the pass itself marks its rewrites; otherwise they are the connected changes of the graph.
        others: whether the finding occurs without them too, so that others are wrong as well.
        trials: how many selections of rewrites were verified.
        why: why nothing is blamed, or what is uncertain; or "".
    """

    rewrites: tuple[Rewrite, ...] = ()
    total: int = 0
    asked: bool = True
    others: bool = False
    trials: int = 0
    why: str = ""

    def __str__(self) -> str:
        what = "rewrite" if self.asked else "change"
        if not self.rewrites:
            return f"no single {what} ({self.why})"
        if len(self.rewrites) == 1:
            one = self.rewrites[0]
            text = f"{what} {one.number} of {self.total}, {one}"
        else:
            numbers = [str(one.number) for one in self.rewrites]
            listed = f"{', '.join(numbers[:-1])} and {numbers[-1]}"
            text = f"{what}s {listed} of {self.total} together, {', '.join(map(str, self.rewrites))}"
        text += "; others cause it too" if self.others else ""
        return f"{text} ({self.why})" if self.why else text


def encode_blame(blame: Blame) -> dict[str, Any]:
    """Write as JSON-compatible data."""
    return {**asdict(blame), "rewrites": [{**asdict(one), "nodes": list(one.nodes)} for one in blame.rewrites]}


def decode_blame(data: Any) -> Blame:
    """Read from JSON-able data. Raises `TypeError`, `KeyError` or `ValueError` for malformed data."""
    rewrites = tuple(
        Rewrite(
            _of(int, one["number"]), _of(str, one["pattern"]), _of(str, one["node"]),
            tuple(_of(str, node) for node in _of(list, one["nodes"])),
        )
        for one in _of(list, data["rewrites"])
    )  # fmt: skip
    return Blame(
        rewrites, _of(int, data["total"]), _of(bool, data["asked"]), _of(bool, data["others"]),
        _of(int, data["trials"]), _of(str, data["why"]),
    )  # fmt: skip


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{repr(value)[:60]} is not of type {kind.__name__}")
    return value


__all__ = ["Blame", "Rewrite", "decode_blame", "encode_blame"]
