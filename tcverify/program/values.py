"""Constants and specs of graphs as JSON-able data, for program files and messages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from tcverify.errors import ProgramError, TcverifyError, UnsupportedOp
from tcverify.ops import qualified_name, resolve
from tcverify.program.graph import RankConstant, Slot

MAX_DEPTH = 64
MAX_TEXT = 1000

_DTYPES = {
    name: d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and not (name := str(d).removeprefix("torch.")).startswith(("quint", "qint", "bits"))
}
#: Devices that graphs may name. Programs are not bound to any of them.
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps|hpu|mtia|xla)(:[0-9]{1,2})?|meta")
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    str(m).removeprefix("torch."): m
    for m in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}


class NotSerialisable(TcverifyError):
    """A graph contains something that program files cannot: a submodule, an attribute, a foreign function or object."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def encode_value(value: Any, depth: int = 0) -> Any:
    """Write an argument of a node, or metadata.

    Raises:
        NotSerialisable: files cannot represent it.
    """
    if depth > MAX_DEPTH:
        raise NotSerialisable(f"a constant is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int:
        if not -(1 << 63) <= value < 1 << 63:
            raise NotSerialisable(f"an integer of {value.bit_length()} bits cannot be written to a program file")
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, RankConstant):
        return {"rank_constant": value.name}
    if isinstance(value, Slot):
        return {"slot": value.index}
    if isinstance(value, list):
        return [encode_value(v, depth + 1) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [encode_value(v, depth + 1) for v in value]}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": [[k, encode_value(v, depth + 1)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [encode_value(v, depth + 1) for v in (value.start, value.stop, value.step)]}
    return _encode_constant(value)


def _encode_constant(value: Any) -> dict[str, Any]:
    """Write a constant without a JSON counterpart."""
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.layout) and value is torch.strided:
        return {"layout": "strided"}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, torch._ops.OpOverload):
        return {"op": qualified_name(value)}
    raise NotSerialisable(f"the constant {value!r} of type {type(value).__name__} cannot be written to a program file")


def read_keys(record: Any, allowed: Iterable[str], where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ProgramError(f"{where} is not an object")
    if not record.keys() <= (allowed if isinstance(allowed, frozenset) else set(allowed)):
        unknown = sorted(set(record) - set(allowed))
        raise ProgramError(f"{where} has unknown keys {', '.join(unknown)}")
    return record


def read_int(value: Any, where: str, low: int, high: int = 1 << 40) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ProgramError(f"{where} is {value!r}, not an integer from {low} to {high}")
    return value


def read_text(value: Any, where: str) -> str:
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise ProgramError(f"{where} is not a short printable string")
    return value


def read_sizes(value: Any, whole: str, one: str) -> tuple[int, ...]:
    """Read sizes or strides."""
    for size in read_list(value, f"the {whole}"):
        if type(size) is not int or not 0 <= size <= 1 << 40:
            read_int(size, f"a {one}", 0)
    return tuple(value)


def read_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProgramError(f"{where} is not a list")
    return value


class ValueReader:
    """Reads the output of `encode_value`.

    Args:
        where: the name of the source for errors.
    """

    def __init__(self, where: str) -> None:
        self.where = where

    def dtype(self, name: Any) -> torch.dtype:
        if not isinstance(name, str) or name not in _DTYPES:
            raise ProgramError(f"{name!r} is not a dtype")
        return _DTYPES[name]

    def value(self, data: Any, nodes: Mapping[Any, Any], where: str, depth: int = 0) -> Any:
        """Read an argument.

        Args:
            nodes: the value for each node, by name, or for each slot, by number.
            where: the name of its owner for errors.

        Raises:
            ProgramError: it is malformed.
        """
        kind_of = type(data)
        if kind_of is dict and len(data) == 1 and type(name := data.get("node")) is str and name in nodes:
            return nodes[name]  # most arguments are nodes
        if depth > MAX_DEPTH:
            raise ProgramError(f"{where} is nested too deeply")
        if data is None or kind_of in (bool, str, float):
            return data
        if kind_of is int:
            return read_int(data, f"an argument of {where}", -(1 << 63), (1 << 63) - 1)
        if kind_of is list:
            return [self.value(v, nodes, where, depth + 1) for v in data]
        if not isinstance(data, dict) or len(data) != 1:
            raise ProgramError(f"{where}: {data!r} is not an argument")
        ((kind, inner),) = data.items()
        return self.tagged(kind, inner, nodes, where, depth)

    def tagged(self, kind: str, inner: Any, nodes: Mapping[Any, Any], where: str, depth: int) -> Any:
        if kind == "node":
            if inner not in nodes:
                raise ProgramError(f"{where} reads '{inner}', which is not defined before it")
            return nodes[inner]
        if kind == "slot" and inner in nodes:
            return nodes[inner]
        if kind == "rank_constant":
            return RankConstant(read_text(inner, f"a rank constant of {where}"))
        if kind == "tuple":
            return tuple(self.value(v, nodes, where, depth + 1) for v in read_list(inner, "a tuple"))
        if kind == "dict":
            return {
                read_text(k, "a key"): self.value(v, nodes, where, depth + 1) for k, v in read_list(inner, "a dict")
            }
        if kind == "slice":
            start, stop, step = (self.value(v, nodes, where, depth + 1) for v in read_list(inner, "a slice"))
            return slice(start, stop, step)
        if kind == "float" and inner in ("nan", "inf", "-inf"):
            return float(inner)
        if kind == "dtype":
            return self.dtype(inner)
        if kind == "device" and isinstance(inner, str) and _DEVICE.fullmatch(inner):
            return torch.device(inner)
        if kind == "layout" and inner in _LAYOUTS:
            return _LAYOUTS[inner]
        if kind == "memory_format" and inner in _MEMORY_FORMATS:
            return _MEMORY_FORMATS[inner]
        if kind == "ellipsis":
            return Ellipsis
        if kind == "op":
            return _op(read_text(inner, f"an op that {where} is given"), where)
        raise ProgramError(f"{where}: {kind} {inner!r} is not an argument")


def _op(name: str, where: str) -> Any:
    try:
        return resolve(name)
    except UnsupportedOp as error:
        raise ProgramError(f"{where}: {error.message}") from None
