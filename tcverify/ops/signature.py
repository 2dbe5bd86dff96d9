"""Fits what an op means here to the signature under which another library has defined it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tcverify.errors import UnsupportedOp

if TYPE_CHECKING:
    from tcverify.ops.table import Op

Schema = torch._C.FunctionSchema


def fit(op: Op, found: Schema) -> Op:
    """Return `op` for calls whose arguments follow the signature `found`.

    Signatures agree when every argument of ours is there by name and type, what they have beyond has a default, and the
    results have the same types; `SymInt` is `int`. Defaults are those of `found`. Where they do not agree, the op returned
    has no meaning, and its reason shows both signatures.
    """
    ours = torch._C.parse_schema(op.name + op.signature)
    if not _agree(ours, found):
        return replace(op, run=None, fake=None, reason=_clash(ours, found))

    def ordered(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return _in_order_of(ours, _by_name(found, args, kwargs), found, op.name)

    run, fake = op.run, op.fake
    if run is not None and _arguments(ours) != _arguments(found):
        run = _reordered(run, ordered, collective=op.collective)
    if fake is not None:
        fake = _reordered(fake, ordered, collective=False)
    return replace(op, run=run, fake=fake)


def _agree(ours: Schema, found: Schema) -> bool:
    known = {a.name: a for a in ours.arguments}
    theirs = {a.name: a for a in found.arguments}
    return (
        all(name in theirs or a.has_default_value() for name, a in known.items())
        and all(str(a.type) == str(theirs[name].type) for name, a in known.items() if name in theirs)
        and all(name in known or a.has_default_value() for name, a in theirs.items())
        and not any(a.alias_info is not None for a in (*found.arguments, *found.returns))
        and [str(r.type) for r in ours.returns] == [str(r.type) for r in found.returns]
    )


def _arguments(schema: Schema) -> list[tuple[Any, ...]]:
    return [(a.name, a.has_default_value(), a.default_value) for a in schema.arguments]


def _clash(ours: Schema, found: Schema) -> str:
    return (
        f"another library defines it as {found}, which is not the known {ours}; use a version of that library with the known "
        "signature, or give its op a meaning with tcverify.register_dialect"
    )


def _by_name(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in. Raises TypeError where they do not fit the signature."""
    if len(args) > len(schema.arguments):
        raise TypeError(f"{schema.name} takes {len(schema.arguments)} arguments, but is given {len(args)}")
    values = dict(zip([a.name for a in schema.arguments], args, strict=False))
    for name, value in kwargs.items():
        if name in values or all(a.name != name for a in schema.arguments):
            raise TypeError(f"{schema.name} is given '{name}', which it does not take or has already")
        values[name] = value
    for argument in schema.arguments[len(args) :]:
        if argument.name in values:
            continue
        if not argument.has_default_value():
            raise TypeError(f"{schema.name} lacks its argument '{argument.name}'")
        values[argument.name] = argument.default_value
    return values


def _in_order_of(ours: Schema, values: dict[str, Any], found: Schema, name: str) -> list[Any]:
    ordered = [values.pop(a.name) if a.name in values else a.default_value for a in ours.arguments]
    for argument in found.arguments:
        if argument.name in values and not _is(values[argument.name], argument.default_value):
            raise UnsupportedOp(
                name,
                f"it is given {argument.name}={values[argument.name]!r}, an argument of {found} with no meaning here",
            )
    return ordered


def _is(value: Any, default: Any) -> bool:
    return value is default or (
        type(value) is type(default) and not isinstance(value, torch.Tensor) and value == default
    )


def _reordered(
    run: Callable[..., Any], ordered: Callable[[Sequence[Any], Mapping[str, Any]], list[Any]], *, collective: bool
) -> Callable[..., Any]:
    if collective:
        return lambda me, *args, **kwargs: run(me, *ordered(args, kwargs))
    return lambda *args, **kwargs: run(*ordered(args, kwargs))


__all__ = ["fit"]
