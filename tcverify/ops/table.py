"""Looks ops up by qualified name: what a node means, in one place for all dialects.

An op is found by name (`tensor_cast::all_reduce`), never by identity, so that graphs made by another library that registers
ops under the same names mean the same here.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch

from tcverify.errors import UnsupportedOp
from tcverify.ops.dialects.aten import torch_op
from tcverify.ops.op import TORCH, Op
from tcverify.ops.signature import fit_signature

#: Python callables that FX graphs use as targets, by the name they have in files.
PYTHON_OPS: dict[str, Callable[..., Any]] = {
    f"python::{f.__name__}": f
    for f in (
        operator.getitem, operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
        operator.neg, operator.matmul, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
        operator.pow, operator.abs, operator.pos, operator.and_, operator.or_, operator.not_, math.ceil, math.floor,
        math.trunc, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_float, torch.sym_int, torch.sym_ite,
        torch.sym_sum,
    )
}  # fmt: skip
_PYTHON_NAMES = {f: name for name, f in PYTHON_OPS.items()}

_DIALECTS: dict[str, dict[str, Op]] = {}
_LIBRARIES: dict[str, Callable[[], object]] = {}
_IMPORTED: set[str] = set()
_COMPLETE: set[str] = set()
_CACHE: dict[Any, Op] = {}
_ATEN: dict[str, Any] = {}  # by name; these are never redefined

#: The namespace of ops that are given other ops, and those that mean something here; see `dialects.auto_functionalized`.
_WRAPPERS = "higher_order"
WRAPPED = frozenset({"auto_functionalized", "auto_functionalized_v2"})


def register_dialect(
    namespace: str,
    ops: Iterable[Op],
    load: Callable[[], object] | None = None,
    *,
    imported: bool = False,
    complete: bool = False,
) -> None:
    """Register a dialect: the ops of one namespace, each with its meaning.

    Args:
        namespace: the part of the ops' names before `::`.
        ops: the ops; a name that is already known is replaced.
        load: defines the namespace's ops in torch; called once, when a graph first needs them as callables.
        imported: whether `load` only imports the module that defines the ops.
        complete: whether other ops of the namespace are unsupported, and not uninterpreted functions: they communicate.

    Raises:
        ValueError: an op's name lies outside the namespace.

    Example:
        >>> def scale(x, factor):
        ...     return x * factor
        >>> register_dialect("mylib", [Op("mylib::scale", scale)])
    """
    table = _DIALECTS.setdefault(namespace, {})
    for op in ops:
        if op.name.split("::")[0] != namespace:
            raise ValueError(f"op {op.name} does not belong to dialect {namespace}")
        table[op.name] = op
    if load is not None:
        _LIBRARIES[namespace] = load
        if imported:
            _IMPORTED.add(namespace)
    if complete:
        _COMPLETE.add(namespace)
    _CACHE.clear()


def registered_dialects() -> dict[str, tuple[Op, ...]]:
    """Return the ops of every registered dialect, by namespace, each in the order of its table."""
    return {namespace: tuple(table.values()) for namespace, table in _DIALECTS.items()}


def qualified_name(target: Any) -> str:
    """Return the name of `target` in the tables and in program files.

    `ns::op` for the default overload, `ns::op.overload` otherwise, `python::name` for Python operators; a callable of no
    dialect gets `foreign::module.name`, which no table knows.
    """
    if isinstance(target, torch._ops.OpOverload):
        name = str(target._schema.name)
        return f"{name}.{target._overloadname}" if target._overloadname != "default" else name
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, torch._ops.HigherOrderOperator) and target._name in WRAPPED:
        return f"{_WRAPPERS}::{target._name}"
    try:
        known = _PYTHON_NAMES.get(target)
    except TypeError:
        known = None
    if known is not None:
        return known
    module = getattr(target, "__module__", None) or type(target).__module__
    return f"foreign::{module}.{getattr(target, '__qualname__', type(target).__qualname__)}"


def in_dialect(target: Any) -> bool:
    """Whether `target` is named as an op of a registered dialect, known to it or not."""
    return qualified_name(target).split("::")[0] in _DIALECTS


def lookup(target: Any) -> Op:
    """Return what a `call_function` target means. Unknown ops come back with `run` None and a reason."""
    try:
        return _CACHE[target]
    except KeyError:
        pass
    except TypeError:  # an unhashable callable cannot be in any table
        return Op(qualified_name(target), None, reason="not an op of a known dialect")
    op = _CACHE[target] = _find(target)
    return op


def _find(target: Any) -> Op:
    name = qualified_name(target)
    namespace = name.split("::")[0]
    if namespace == "python":
        return Op(name, PYTHON_OPS[name], aliases=target in (operator.getitem, operator.pos))
    if namespace == _WRAPPERS:
        from tcverify.ops.dialects.auto_functionalized import wrapper

        return wrapper(name, target, lookup)
    if namespace in TORCH:
        return torch_op(name, target)
    op = _DIALECTS.get(namespace, {}).get(name)
    if op is None and namespace in _COMPLETE:
        return Op(name, None, reason=f"dialect '{namespace}' gives it no meaning yet")
    if op is None:
        if not isinstance(target, torch._ops.OpOverload):
            return Op(name, None, reason=f"no dialect '{namespace}' is registered")
        from tcverify.ops.uninterpreted import make_uninterpreted

        return make_uninterpreted(target, name, lookup)
    overload = target if isinstance(target, torch._ops.OpOverload) else getattr(target, "default", None)
    return fit_signature(op, overload._schema) if op.signature and overload is not None else op


def schema_of(target: Any) -> torch._C.FunctionSchema | None:
    """Return the signature of an op with what it writes into and aliases; None for callables that have none."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    op = lookup(target)
    return _parse(op.name + op.schema) if op.schema else target._schema


@lru_cache(maxsize=256)
def _parse(text: str) -> torch._C.FunctionSchema:
    return torch._C.parse_schema(text)


def resolve(name: str) -> Any:
    """Return the callable for `name` in an FX graph.

    Names are resolved of registered dialects, aten, prims, Python operators, and of ops that a library has defined which is
    imported already: those are uninterpreted functions. Nothing is imported. Call it again after another library may have been
    imported: it may have redefined the op.

    Raises:
        UnsupportedOp: nothing here defines the op, or another library has given it a signature that does not agree.
    """
    found = _ATEN.get(name) or PYTHON_OPS.get(name)
    if found is not None:
        return found
    namespace, _, rest = name.partition("::")
    if namespace == _WRAPPERS:
        if rest not in WRAPPED:
            raise UnsupportedOp(name, "it calls a function that has no meaning here")
        from torch._higher_order_ops import auto_functionalize

        return getattr(auto_functionalize, rest)
    known = _DIALECTS.get(namespace, {}).get(name)
    if known is None and (namespace == "python" or namespace in _COMPLETE or not namespace.isidentifier()):
        raise UnsupportedOp(name, "it is in no dialect table")
    _load(namespace)
    base, _, overload = rest.partition(".")
    if namespace == "prims":
        _load_prim(base)
    packet = getattr(getattr(torch.ops, namespace), base, None) if base.isidentifier() else None
    target = getattr(packet, overload or "default", None) if packet is not None else None
    if not isinstance(target, torch._ops.OpOverload):
        own = known is None and namespace not in TORCH
        why = (
            "no library that is imported defines it, nor is it in a dialect table"
            if own
            else "this torch has no such op"
        )
        raise UnsupportedOp(name, why)
    if namespace in TORCH:
        _ATEN[name] = target
    elif known is None or known.run is not None:
        lookup(target).require()
    return target


def define_ops() -> None:
    """Define the ops of all dialects that are not defined yet, for code that uses them as attributes of `torch.ops`.

    Not those that an import defines: it costs a second, and such code has it.
    """
    for namespace in [name for name in _LIBRARIES if name not in _IMPORTED]:
        _load(namespace)


def _load(namespace: str) -> None:
    load = _LIBRARIES.get(namespace)
    if load is not None:
        load()
        del _LIBRARIES[namespace]


def _load_prim(name: str) -> None:
    """Import the module that defines a primitive; the compiler's own take seconds, and are tried last."""
    import torch._prims

    if not hasattr(torch.ops.prims, name):
        with contextlib.suppress(ImportError):
            import torch._inductor.inductor_prims


def current_overload(target: Any) -> Any:
    """Return the op that has the name of `target` now: another library may have redefined it since a graph was created.

    What no dialect knows comes back as it is. Raises as `resolve` does.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in TORCH:
        return target
    name = qualified_name(target)
    return resolve(name) if name in _DIALECTS.get(target.namespace, ()) else target
