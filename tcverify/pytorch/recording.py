"""Records the execution of compiled code, op by op, as an FX graph that shows which values share memory.

The code is called once, on real tensors, under a mode that sees every op. Tensors are identified by their storages, which are all
kept alive, so that two values in one storage are one buffer that was reused. Memory that code allocated unnoticed by the mode
becomes an `aten::empty_strided`; views become `aten::as_strided` of the first recorded value of the storage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from tcverify.capturing.c10d_calls import to_functional_collectives
from tcverify.errors import ProgramError, Unsupported
from tcverify.execution.asynchrony import storage_of
from tcverify.ops import lookup, qualified_name, resolve, with_group
from tcverify.program.builder import has_effect
from tcverify.program.graph import lazy_module
from tcverify.pytorch.groups import known_groups

Tensor = torch.Tensor


def record_compiled(
    call: Callable[[list[Tensor]], Any],
    placeholders: Sequence[tuple[str, Tensor]],
    returned: Callable[[Any], Any],
    recorder: OpRecorder,
) -> fx.Graph:
    """Call compiled code and return what it did.

    Args:
        call: the code; takes its inputs as a list.
        placeholders: name and value of each input, in order. Values are written where the code writes its inputs.
        returned: brings what the code returned into the containers that the graph is to return.
        recorder: records it.
    """
    for name, value in placeholders:
        recorder.input(name, value)
    with torch.no_grad(), recorder:
        result = call([value for _, value in placeholders])
    graph = recorder.graph
    graph.output(pytree.tree_map_only(Tensor, recorder.node, returned(result)))
    graph.lint()
    return graph


class OpRecorder(TorchDispatchMode):
    """Writes every op that runs under it into a graph, except for views: those are where tensors are used.

    Attributes:
        graph: what has run so far.

    Raises:
        Unsupported: what is computed becomes a Python number.
    """

    #: Whether views are calls of the graph, too. Compiled code makes many that say nothing of what was compiled.
    records_views: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self._roots: dict[int, tuple[fx.Node, Tensor]] = {}  # by storage: what it was first seen as
        self._views: dict[tuple[Any, ...], fx.Node] = {}
        self._kept: list[tuple[fx.Node, Any]] = []
        self._unknown: set[int] = set()  # storages whose values depend on those of inputs

    def input(self, name: str, value: Tensor) -> None:
        """Add an input of the graph."""
        node = self.graph.placeholder(name)
        self._hold(value, node)
        self._unknown.add(storage_of(value))

    def node(self, value: Tensor) -> fx.Node:
        """The node of a tensor, added if there is none yet."""
        key = _layout(value)
        if key in self._views:
            return self._views[key]
        if storage_of(value) not in self._roots:
            self._allocate(value)
            if key in self._views:
                return self._views[key]
        root, _ = self._roots[storage_of(value)]
        node = self._call("aten::as_strided", root, list(value.shape), list(value.stride()), value.storage_offset())
        self._views[key] = node
        self._kept.append((node, value))
        return node

    def describe(self) -> None:
        """Give each node its tensor as metadata."""
        for node, value in self._kept:
            node.meta["val"] = value

    def _allocate(self, value: Tensor) -> None:
        """Add memory that has come from elsewhere: the whole storage of a tensor."""
        size = value.untyped_storage().nbytes() // max(value.itemsize, 1)
        node = self._call("aten::empty_strided", [size], [1], dtype=value.dtype)
        self._hold(torch.as_strided(value, [size], [1], 0), node)

    def _constant(self, value: Tensor) -> fx.Node:
        """Add numbers that code has written as a tensor, as ops that make them."""
        if value.numel() < 2:
            return self._call("aten::full", list(value.shape), value.item() if value.numel() else 0, dtype=value.dtype)
        parts = [
            self._call("aten::full", [1], first, dtype=value.dtype)
            if many == 1
            else self._call("aten::arange.start", first, first + many, dtype=value.dtype)
            for first, many in _runs(value.flatten().tolist())
        ]
        return self._call("aten::view", self._call("aten::cat", parts), list(value.shape))

    def _hold(self, value: Tensor, node: fx.Node) -> None:
        if storage_of(value) not in self._roots:
            self._roots[storage_of(value)] = node, value
            self._views[_layout(value)] = node
        self._kept.append((node, value))

    def _call(self, op: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(resolve(op), args, kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # what they do with the tensors that they wrap comes here again
        name = qualified_name(func)
        if name == "aten::lift_fresh":
            self._hold(args[0], self._constant(args[0]))
        view = _is_view(func, name)
        if name.startswith("profiler::") or (view and not self.records_views):
            return func(*args, **kwargs)
        if name == "aten::resize_":
            return _resized(func, args, kwargs)
        used: set[int] = set()  # storages

        def operand(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            used.add(storage_of(value))
            return self.node(value)

        operands, named = map_aggregate((list(args), kwargs), operand)
        unknown = not used.isdisjoint(self._unknown)
        if unknown and name == "aten::_local_scalar_dense":
            raise Unsupported("the code makes a Python number of a value, which a record of it would keep")
        result = _performed(func, name, args, kwargs)
        if unknown:
            made = {storage_of(one) for one in pytree.tree_leaves(result) if isinstance(one, Tensor)}
            self._unknown |= made | (used if func._schema.is_mutable else set())
        if not (view and isinstance(result, Tensor) and _layout(result) in self._views):
            self._write(func, name, list(operands), dict(named), result)
        return result

    def _write(self, func: Any, name: str, args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
        kwargs = {key: value for key, value in kwargs.items() if key not in _WHERE and value is not None}
        outs = {a.name for a in func._schema.arguments if a.is_out}
        plain = _without_out(func) if name.startswith("aten::") and len(outs) == 1 else None
        if plain is not None:
            out = kwargs.pop(next(iter(outs)))
            made = self.graph.call_function(plain, tuple(args), kwargs)
            self._kept += [(made, result), (self._call("aten::copy_", out, made), result)]
            return
        node = self.graph.call_function(func, tuple(args), kwargs)
        if isinstance(result, Tensor):
            self._made(result, node)
        elif isinstance(result, (tuple, list)):
            self._kept.append((node, tuple(result)))
            for index, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._made(part, self.graph.call_function(operator.getitem, (node, index)))

    def _made(self, value: Tensor, node: fx.Node) -> None:
        if storage_of(value) in self._roots:
            self._views[_layout(value)] = node
            self._kept.append((node, value))
        else:
            self._hold(value, node)


class CollectiveRecorder(OpRecorder):
    """Records ops with views, and the collectives that process groups are asked for.

    That the result of a collective is wrapped until it is used is not recorded.
    """

    records_views: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._root = torch.nn.Module()
        self._objects = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if qualified_name(func) == "_c10d_functional::_wrap_tensor_autograd":
            return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _write(self, func: Any, name: str, args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
        held, named = map_aggregate((args, kwargs), lambda x: self._held(x) if isinstance(x, torch.ScriptObject) else x)
        super()._write(func, name, list(held), dict(named), result)

    def _held(self, value: torch.ScriptObject) -> fx.Node:
        """A process group or a reduction as an attribute of the module, which code can name."""
        self._objects += 1
        setattr(self._root, f"object_{self._objects}", value)
        return self.graph.get_attr(f"object_{self._objects}")

    def finish(self, returned: Any) -> fx.GraphModule:
        """The recorded graph, with functional collectives."""
        self.graph.output(pytree.tree_map_only(Tensor, self.node, returned))
        self.describe()
        try:
            made = to_functional_collectives(lazy_module(self._root, self.graph))
        except ProgramError as error:
            raise Unsupported(str(error)) from error
        made.graph.eliminate_dead_code(has_effect)
        for node in made.graph.nodes:
            node.meta.pop("val", None)
        return made


#: Arguments that say where an op runs.
_WHERE = frozenset({"device", "layout", "pin_memory"})


def _layout(value: Tensor) -> tuple[Any, ...]:
    return (storage_of(value), value.dtype, tuple(value.shape), tuple(value.stride()), value.storage_offset())


def _is_view(func: Any, name: str) -> bool:
    """Whether an op gives another view of its operand, and does nothing else."""
    if name == "aten::detach_":  # autograd's, in place
        return True
    if not name.startswith(("aten::", "prims::")):
        return False
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _performed(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What an op gives: values do not matter, and what has not been communicated is zero."""
    if name.startswith(("aten::", "prims::")) and torch._C._dispatch_has_computed_kernel_for_dispatch_key(
        func.name(), "CPU"
    ):
        return func(*args, **kwargs)
    op = lookup(func)
    if name.startswith("_c10d_functional"):
        result = func(*args, **kwargs)
        if op.phase == "start":
            written = result if isinstance(result, (list, tuple)) else [result]
            for one in written:
                one.zero_()
        return result
    if op.fake is None:
        return func(*args, **kwargs)
    if op.sized:
        args, kwargs = with_group(op, func, args, kwargs, known_groups().__getitem__)
    return pytree.tree_map_only(Tensor, _zeros, op.fake(*args, **kwargs))


def _zeros(outline: Tensor) -> Tensor:
    return torch.empty_strided(outline.shape, outline.stride(), dtype=outline.dtype).zero_()


def _runs(numbers: Sequence[Any]) -> list[tuple[Any, int]]:
    """Runs of integers that follow one another, as the first one and their number. Other numbers stand alone."""
    found: list[tuple[Any, int]] = []
    for number in numbers:
        if found and type(number) is int and number == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((number, 1))
    return found


def _resized(func: Any, args: Any, kwargs: Any) -> Any:
    """Give a tensor another shape in its own memory: how it uses that from now on, as a view does.

    Raises:
        Unsupported: it gets more memory.
    """
    before = args[0].untyped_storage().nbytes()
    result = func(*args, **kwargs)
    if result.untyped_storage().nbytes() != before:
        raise Unsupported("the code gives a tensor more memory, which a record of it would not show")
    return result


def _without_out(func: Any) -> Any:
    """The overload of an op that returns the tensor into which this one writes; None if there is none."""
    takes = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    packet = func.overloadpacket
    for overload in packet.overloads():
        other = getattr(packet, overload)
        if other._schema.is_mutable or len(other._schema.returns) != 1:
            continue
        if [(a.name, str(a.type)) for a in other._schema.arguments] == takes:
            return other
    return None


__all__ = ["CollectiveRecorder", "OpRecorder", "record_compiled"]
