"""Laws of ops of which only the signature is known, which a user declares in one line each.

    my::rope=rowwise(1)                   slices along dim 1 are computed independently, in the same way
    my::rope=rowwise(x=1, cos=0, sin=0)   the same, where some operands have the dim at another position
    my::gate=pointwise                    elements are computed independently
    my::scale=pointwise(x)                the same, where the other operands are needed whole
    my::project=linear(x)                 linear in x

Several laws of one op hold together.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tcverify.errors import UsageError

_LAW = re.compile(r"\s*(\w+::\w+(?:\.\w+)?)\s*=\s*(\w+)\s*(?:\((.*)\))?\s*")
_SHAPE = "write OP=rowwise(DIM), OP=rowwise(OPERAND=DIM, …), OP=pointwise, OP=pointwise(OPERAND) or OP=linear(OPERAND)"

#: Laws that the user declared, as written, in order.
_LAWS: list[str] = []


@dataclass(frozen=True, slots=True)
class OpLaw:
    """What is known of an op besides its signature.

    Attributes:
        rows: dims along which slices are computed independently: for each, the dim of the operands by name, and under the name ""
            the dim of all other tensors of the call that have the same length there.
        pointwise: whether elements are computed independently: of the named operands, or of all if none is named.
        linear: the operand in which the op is linear; "" means the first.
    """

    rows: tuple[tuple[tuple[str, int], ...], ...] = ()
    pointwise: tuple[str, ...] | None = None
    linear: str | None = None

    @property
    def texts(self) -> list[str]:
        """The laws as a user declares them, without the op."""
        found = [f"rowwise({', '.join(f'{n}={d}' if n else str(d) for n, d in row)})" for row in self.rows]
        if self.pointwise is not None:
            found.append(f"pointwise({', '.join(self.pointwise)})" if self.pointwise else "pointwise")
        if self.linear is not None:
            found.append(f"linear({self.linear})" if self.linear else "linear")
        return found


def read_op_laws(texts: Iterable[str]) -> dict[str, OpLaw]:
    """Parse laws; returned by the qualified name of the op.

    Raises:
        UsageError: a law is malformed.
    """
    found: dict[str, OpLaw] = {}
    for text in texts:
        match = _LAW.fullmatch(text)
        if match is None:
            raise UsageError(f"'{text}' is not a law of an op", _SHAPE)
        name, kind, inside = match[1].removesuffix(".default"), match[2], (match[3] or "").strip()
        parts = [part.strip() for part in inside.split(",")] if inside else []
        law = found.get(name, OpLaw())
        if kind == "rowwise" and parts:
            law = replace(law, rows=(*law.rows, *_rows(text, parts)))
        elif kind == "pointwise" and all(part.isidentifier() for part in parts):
            law = replace(law, pointwise=tuple(parts))
        elif kind == "linear" and len(parts) < 2 and all(part.isidentifier() for part in parts):
            law = replace(law, linear=parts[0] if parts else "")
        else:
            raise UsageError(f"'{text}' is not a law of an op", _SHAPE)
        found[name] = law
    return found


def _rows(text: str, parts: list[str]) -> list[tuple[tuple[str, int], ...]]:
    named: list[tuple[str, int]] = []
    plain: list[tuple[tuple[str, int], ...]] = []
    for part in parts:
        operand, equals, dim = (piece.strip() for piece in part.rpartition("="))
        if not re.fullmatch(r"-?\d+", dim) or (bool(equals) and not operand.isidentifier()):
            raise UsageError(f"'{text}' is not a law of an op: '{part}' names no dim", _SHAPE)
        if operand:
            named.append((operand, int(dim)))
        else:
            plain.append((("", int(dim)),))
    return [*plain, *([tuple(named)] if named else [])]


#: The laws in effect, by the qualified name of the op.
_READ: dict[str, OpLaw] = {}


def declare_op_law(text: str) -> None:
    """Declare a law of an op of which only the signature is known, here and in every process that tcverify starts from now on.

    Args:
        text: e.g. "my::rope=rowwise(1)"; see the docstring of this module.

    Raises:
        UsageError: the law is malformed.
    """
    known = read_op_laws([*_LAWS, text])
    if text not in _LAWS:
        _LAWS.append(text)
    _READ.update(known)


def declared_op_laws() -> tuple[str, ...]:
    """Return the declared laws, as written."""
    return tuple(_LAWS)


def law_of(name: str) -> OpLaw | None:
    """Return what is declared for an op, by its qualified name; None if nothing is."""
    return _READ.get(name)


@contextlib.contextmanager
def supposing(laws: Mapping[str, OpLaw]) -> Iterator[None]:
    """Replace the declared laws by others, in this process and context."""
    before = dict(_READ)
    _READ.update(laws)
    try:
        yield
    finally:
        _READ.clear()
        _READ.update(before)


__all__ = ["OpLaw", "declare_op_law", "declared_op_laws", "law_of", "read_op_laws", "supposing"]
