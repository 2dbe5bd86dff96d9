"""Compares the signature of an op with that under which another library has defined it, and calls with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch

from tcverify.errors import UnsupportedOp
from tcverify.ops.op import Op

Schema = torch._C.FunctionSchema


def fit_signature(op: Op, found: Schema) -> Op:
    """Return `op`, which has a signature, for calls of an op that torch knows by the signature `found`.

    Signatures agree when they have the same arguments and results, where `SymInt` is `int`, and what `found` has beyond them
    has defaults: then the op has a meaning as long as no such argument is given. Where they do not agree, the op returned has
    no meaning, and its reason shows both signatures.
    """
    ours = _parsed(op.name, op.signature)
    if not _agree(ours, found):
        reason = (
            f"another library defines it as {found}, which is not the known {ours}; use a version of that library with the "
            "known signature, or give its op a meaning with tcverify.register_dialect"
        )
        return replace(op, run=None, fake=None, reason=reason)
    run, fake = op.run, op.fake
    if run is not None and len(found.arguments) > len(ours.arguments):
        run = _within(run, op, found)
    if fake is not None:
        fake = _ordered(fake, op)
    return replace(op, run=run, fake=fake)


def gives_more(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call gives arguments that the signature of `op` does not have."""
    if not op.signature:
        return False
    names = _names(op.name, op.signature)
    return len(args) > len(names) or any(name not in names for name in kwargs)


@lru_cache(maxsize=1024)
def _parsed(name: str, signature: str) -> Schema:
    return torch._C.parse_schema(name + signature)


@lru_cache(maxsize=1024)
def _names(name: str, signature: str) -> tuple[str, ...]:
    return tuple(a.name for a in _parsed(name, signature).arguments)


def _agree(ours: Schema, found: Schema) -> bool:
    known = len(ours.arguments)
    shared, more = found.arguments[:known], found.arguments[known:]
    return (
        _arguments(shared) == _arguments(ours.arguments)
        and all(a.has_default_value() and a.alias_info is None for a in more)
        and [_writes(a) for a in (*shared, *found.returns)] == [_writes(a) for a in (*ours.arguments, *ours.returns)]
        and [str(r.type) for r in ours.returns] == [str(r.type) for r in found.returns]
    )


def _writes(argument: Any) -> bool | None:
    """Whether an argument or result is written into; None where it shares no storage."""
    return None if argument.alias_info is None else bool(argument.alias_info.is_write)


def _arguments(arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [(a.name, str(a.type), a.has_default_value(), a.default_value) for a in arguments]


def _within(run: Callable[..., Any], op: Op, found: Schema) -> Callable[..., Any]:
    """`run`, for calls that give no more than the signature of `op` has."""
    me = 1 if op.collective else 0  # the executing rank comes first

    def checked(*args: Any, **kwargs: Any) -> Any:
        if gives_more(op, args[me:], kwargs):
            raise UnsupportedOp(op.name, f"it is given an argument of {found} that has no meaning here")
        return run(*args, **kwargs)

    return checked


def _ordered(fake: Callable[..., Any], op: Op) -> Callable[..., Any]:
    """`fake`, for calls that name their arguments or leave them to their defaults."""
    ours = _parsed(op.name, op.signature).arguments

    def call(*args: Any, **kwargs: Any) -> Any:
        if gives_more(op, args, kwargs):
            raise UnsupportedOp(op.name, "it is given an argument that has no meaning here")
        values = list(args)
        for argument in ours[len(args) :]:
            if argument.name not in kwargs and not argument.has_default_value():
                raise TypeError(f"it lacks its argument '{argument.name}'")
            values.append(kwargs.get(argument.name, argument.default_value))
        return fake(*values)

    return call


def wrong_dtype(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What is wrong with a call that has an integer which is no dtype where a dtype is wanted: torch would crash, not raise."""
    for place, name in _dtypes_of(target):
        code = args[place] if place < len(args) else kwargs.get(name)
        if type(code) is int and code < 0:
            return f"{name} is {code}, which is no dtype"
    return None


@cache
def _dtypes_of(target: Any) -> tuple[tuple[int, str], ...]:
    """The arguments of an op that are dtypes, which signatures call integers: positions and names."""
    schema = getattr(target, "_schema", None)
    declared = () if schema is None else schema.arguments
    return tuple((i, one.name) for i, one in enumerate(declared) if "ScalarType" in str(one.real_type))


__all__ = ["fit_signature", "gives_more", "wrong_dtype"]
