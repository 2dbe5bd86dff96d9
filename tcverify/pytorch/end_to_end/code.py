"""A program as Python: what each rank runs as an eager function, and its inputs as literals."""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import qualified_name, schema_of
from tcverify.program import Program

#: Namespaces of ops that torch defines on import; `p2p` is defined by the scripts.
NAMESPACES = frozenset({"aten", "prims", "_c10d_functional", "inductor", "p2p"})

#: Names that scripts use.
TAKEN = frozenset({
    "torch", "dist", "mp", "os", "sys", "tempfile", "time", "traceback", "datetime", "config", "config_comms", "mock", "aten",
    "c10d", "prims", "inductor", "p2p", "step", "inputs", "rewritten", "observed", "run", "main", "differs", "math", "inf", "nan",
    "graph", "ctx", "weight", "gm", "mesh", "placed", "whole", "distributed",
})  # fmt: skip

#: Elements of the inputs of all ranks that a script can hold.
MAX_ELEMENTS = 4096

_SHORT = {"_c10d_functional": "c10d"}


@dataclass(frozen=True, slots=True)
class Line:
    """A call of a graph as code.

    Attributes:
        name: of its result.
        text: the expression.
        reads: names of values that it reads.
    """

    name: str
    text: str
    reads: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.text}"


@dataclass(frozen=True, slots=True)
class RankCode:
    """What a rank runs, as code.

    Attributes:
        inputs: names of the inputs in the program, in order.
        parameters: their names in the code.
        result: the expression that is returned.
        reads: names of values that the result holds, in order.
    """

    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    lines: tuple[Line, ...]
    result: str
    reads: tuple[str, ...]


def rank_code(program: Program, rank: int) -> RankCode:
    """Write what a rank runs as code.

    Raises:
        Unsupported: it holds what torch alone does not have.
    """
    graph = program.graph(rank)
    names = _names(graph)
    groups = {dim.name for dim in program.mesh.dims}
    inputs, lines = [], []
    for node in graph.nodes:
        reads = tuple(names[one] for one in node.all_input_nodes)
        if node.op == "placeholder":
            inputs.append(node)
        elif node.op == "call_function":
            lines.append(Line(names[node], _call(node, names, groups), reads))
        elif node.op == "output":
            own = tuple(one.name for one in inputs)
            return RankCode(own, tuple(names[one] for one in inputs), tuple(lines), _render(node.args[0], names), reads)
        else:
            raise Unsupported(f"node '{node.name}' is a constant of the module")
    raise Unsupported("the graph has no output")


def _names(graph: fx.Graph) -> dict[fx.Node, str]:
    """A Python name for every node; those of inputs are kept unless the scripts use them."""
    return {
        node: f"{node.name}_" if node.name in TAKEN or keyword.iskeyword(node.name) else node.name
        for node in graph.nodes
    }


def _call(node: fx.Node, names: Mapping[fx.Node, str], groups: set[str]) -> str:
    if node.target is operator.getitem:
        value, index = node.args
        return f"{_render(value, names)}[{_render(index, names)}]"
    schema = schema_of(node.target)
    namespace, _, name = qualified_name(node.target).partition("::")
    if schema is None or namespace not in NAMESPACES:
        raise Unsupported(f"node '{node.name}' calls {qualified_name(node.target)}, which torch alone does not have")
    base, _, overload = name.partition(".")
    wanted = [argument.name for argument in schema.arguments]

    def argument(name: str, value: Any) -> str:
        if name.startswith("group") and isinstance(value, str) and value in groups:
            return f"GROUP[{value!r}]"
        return _render(value, names)

    args = [argument(name, value) for name, value in zip(wanted, node.args, strict=False)]
    args += [f"{name}={argument(name, value)}" for name, value in node.kwargs.items()]
    return f"{_SHORT.get(namespace, namespace)}.{base}.{overload or 'default'}({', '.join(args)})"


def _render(value: Any, names: Mapping[fx.Node, str]) -> str:
    """A value of an argument as an expression."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        parts = [_render(one, names) for one in value]
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_render(one, names)}" for key, one in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    raise Unsupported(f"an argument is {value!r:.60}, which a script cannot hold")


def text_of(
    code: RankCode, name: str, *, more: Sequence[str] = (), after: Callable[[Line], Iterator[str]] | None = None
) -> str:
    """The function of a rank.

    Args:
        more: lines in front of the first.
        after: what follows a line.
    """
    body = [*more]
    for line in code.lines:
        body.append(str(line))
        body += after(line) if after is not None else []
    body.append(f"return {code.result}")
    return "\n".join([f"def {name}({', '.join(code.parameters)}):", *(f"    {one}" for one in body)])


def input_literals(program: Program) -> list[list[str]]:
    """The inputs of each rank as expressions.

    Raises:
        Unsupported: they are too large to be written down.
    """
    sizes = [
        math.prod(spec.local_shape(program.mesh, rank)) for spec in program.inputs for rank in range(program.world_size)
    ]
    if sum(sizes) > MAX_ELEMENTS:
        raise Unsupported(f"the inputs of all ranks have {sum(sizes)} elements: a script holds {MAX_ELEMENTS}")
    return [[_literal(value) for value in program.values(rank)] for rank in range(program.world_size)]


def _literal(value: torch.Tensor) -> str:
    inferred = value.dtype in (torch.float32, torch.int64, torch.bool) and value.numel()
    dtype = "" if inferred else f", dtype={value.dtype}"
    text = _digits(value.tolist(), value.dtype)
    shaped = f".reshape({tuple(value.shape)})" if not value.numel() else ""
    return f"torch.tensor({'[]' if not value.numel() else text}{dtype}){shaped}"


def _digits(value: Any, dtype: torch.dtype) -> str:
    """Numbers with as few digits as give the same value in their dtype."""
    if isinstance(value, list):
        return f"[{', '.join(_digits(one, dtype) for one in value)}]"
    if not isinstance(value, float):
        return repr(value)
    if not math.isfinite(value):
        return f"float({str(value)!r})"
    exact = torch.tensor(value, dtype=dtype)
    return next(
        text
        for digits in range(1, 18)
        if torch.tensor(float(text := repr(float(f"{value:.{digits}g}"))), dtype=dtype) == exact
    )


__all__ = ["MAX_ELEMENTS", "NAMESPACES", "Line", "RankCode", "input_literals", "rank_code", "text_of"]
