"""Reads the graphs that torch.compile leaves behind as Python text; nothing of the text is executed.

`fx_graph_runnable` files (of tlparse, `TORCH_COMPILE_DEBUG` and the minifier), the logs of `TORCH_TRACE` that hold them, and
graphs as `GraphModule.print_readable` prints them, with the shapes of their inputs as annotations.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx

from tcverify.capturing.normalize import plain
from tcverify.capturing.record import Captured, GroupSize
from tcverify.errors import ProgramError
from tcverify.ops import define_ops, new_fake_mode

#: Files that may hold such graphs.
SUFFIXES = (".py", ".txt", ".log")

#: Most bytes of such a file.
MAX_FILE = 256 << 20

#: What the class of a graph derives from, at the start of a line.
_CLASS = re.compile(r"^\s*class\s+(<\w+>|\w+)\s*\(\s*(torch\.nn\.|nn\.)?Module\s*\)\s*:", re.MULTILINE)

#: A line of a trace log that begins an entry.
_ENTRY = re.compile(r"^[VIWEC]\d{4} [\d:.]+ \d+ .*?\] (\{.*\})$")

#: The artifacts of a trace log that hold a graph.
_RUNNABLE = "fx_graph_runnable"

#: A tensor in an annotation: "f32[8, 64][64, 1]cuda:0", the strides and the device where they are printed.
_ANNOTATED = re.compile(r"^(?:Sym\(\w+\))?(\w+)\[([^\]]*)\](?:\[([^\]]*)\])?")

#: Such an annotation in the text of a graph: other modules have none.
_PRINTED = re.compile(r""": *["'](Sym\(\w+\))?[a-z]+\d\w*\[[\d, ]*\]""")

_DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64,
    "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8, "b8": torch.bool, "c64": torch.complex64,
    "c128": torch.complex128, "f8e4m3fn": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
    "f8e4m3fnuz": torch.float8_e4m3fnuz, "f8e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip

_BINARY: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], Callable[..., Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip

#: What makes the constants of a module; everything else is refused.
_CONSTANTS: dict[str, Callable[..., Any]] = {
    "torch.randn": torch.randn, "torch.randint": torch.randint, "torch.ones": torch.ones, "torch.zeros": torch.zeros,
    "torch.tensor": torch.tensor, "tensor": torch.tensor, "torch.empty": torch.empty, "torch.rand": torch.rand,
    "torch.full": torch.full, "torch.Size": list, "Parameter": torch.nn.Parameter,
    "torch.nn.Parameter": torch.nn.Parameter, "torch.nn.parameter.Parameter": torch.nn.Parameter,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArtifactText:
    """A graph as text.

    Attributes:
        path, number: where it stands: in which file, and which of its graphs it is.
        rank: whose graph it is, where a trace log or the name of a folder says so.
    """

    path: Path
    number: int
    text: str
    rank: int | None = None

    @property
    def name(self) -> str:
        """What names it on the command line."""
        return f"{self.path}:{self.number}"


def place_of(source: str) -> tuple[Path, int | None] | None:
    """The file or folder that a source names, and which of its graphs, if any; None if it is not an artifact.

    Raises:
        ProgramError: it cannot be read.
    """
    match = re.fullmatch(r"(.+):(\d+)", source)
    path, number = (Path(match[1]), int(match[2])) if match is not None else (Path(source), None)
    if path.is_dir():
        return path, number
    if path.suffix not in SUFFIXES or not path.is_file():
        return None
    text = _read(path)
    if path.suffix == ".log":
        return (path, number) if f'"{_RUNNABLE}"' in text else None
    own = _CLASS.search(text)
    printed = own is not None and (own[1].startswith("<") or _PRINTED.search(text) is not None)
    return (path, number) if own and "def forward(" in text and ("def load_args(" in text or printed) else None


def texts_in(path: Path) -> list[ArtifactText]:
    """The graphs that a file holds, or a folder with what is below it, as texts, in order of their ranks.

    Raises:
        ProgramError: it cannot be read, or holds none.
    """
    if not path.is_dir():
        text = _read(path)
        pairs = _logged(text.splitlines()) if path.suffix == ".log" else [(text, None)]
        return [ArtifactText(path, number, one, rank) for number, (one, rank) in enumerate(pairs)]
    files = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
    logs = [one for one in files if one.suffix == ".log"]  # they say their ranks; TORCH_COMPILE_DEBUG writes both
    found: list[ArtifactText] = []
    runnable = [one for one in files if one.name.startswith(_RUNNABLE)]
    if {_rank_in(one) for one in runnable} - {_rank_in(one) for one in logs} - {None}:
        logs = []  # of some ranks alone
    for some in (logs, runnable, files):
        found = found or [one for file in some if place_of(str(file)) is not None for one in texts_in(file)]
    if not found:
        raise ProgramError(
            f"the folder {path} holds no graph of torch.compile",
            f"give one with {_RUNNABLE} files, or with logs that TORCH_TRACE made torch.compile write",
        )
    ranked = [replace(one, rank=_rank_in(one.path)) if one.rank is None else one for one in found]
    return sorted(ranked, key=lambda one: -1 if one.rank is None else one.rank)


def _rank_in(path: Path) -> int | None:
    """The rank that the name of a file or of its folder tells."""
    told = [int(found) for part in path.parts for found in re.findall(r"rank_?(\d+)", part)]
    return told[-1] if told else None


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE:
            raise ProgramError(f"{path} has more than {MAX_FILE} bytes")
        return path.read_text(errors="replace")
    except OSError as error:
        raise ProgramError(f"{path} cannot be read: {error.strerror or error}") from None


def _logged(lines: Iterable[str]) -> Iterator[tuple[str, int | None]]:
    wanted: dict[str, Any] | None = None
    payload: list[str] = []
    for line in (*lines, ""):
        if wanted is not None and line.startswith("\t"):
            payload.append(line[1:])
            continue
        if wanted is not None and payload:
            yield "\n".join(payload), wanted.get("rank")
        wanted, payload = None, []
        entry = _ENTRY.match(line)
        if entry is not None and f'"{_RUNNABLE}"' in line:
            try:
                wanted = json.loads(entry[1])
            except ValueError:
                wanted = None


def read_artifact(artifact: ArtifactText) -> Captured:
    """Read a graph from its text, and bring it into plain form.

    Raises:
        ProgramError: it is cut off, or holds what a graph does not; the message names the line.
    """
    where = str(artifact.path)
    anonymous = _CLASS.sub(lambda found: found[0].replace("<", "_").replace(">", "_"), artifact.text)
    try:
        tree = ast.parse(anonymous)
    except SyntaxError as error:
        raise ProgramError(
            f"{where}: line {error.lineno} is not Python ({error.msg}): the file is truncated, or was edited",
            "give the whole file, as torch.compile wrote it",
        ) from None
    module, sizes = _Reader(where, tree).read()
    return replace(plain(module), sizes=sizes, rank=artifact.rank)


class _Reader:
    """Reads one graph."""

    def __init__(self, where: str, tree: ast.Module) -> None:
        self._where, self._tree = where, tree
        self._graph = fx.Graph()
        self._root = torch.nn.Module()
        self._names: dict[str, Any] = {"None": None, "inf": math.inf, "nan": math.nan, "torch": torch}
        self._attributes: dict[str, fx.Node] = {}

    def read(self) -> tuple[fx.GraphModule, dict[str, GroupSize]]:
        model = self._class()
        self._import()
        functions = {one.name: one for one in model.body if isinstance(one, ast.FunctionDef)}
        if "forward" not in functions:
            raise ProgramError(f"{self._where}: class {model.name} has no forward: the file is truncated")
        if "__init__" in functions:
            for statement in functions["__init__"].body:
                self._attribute(statement)
        forward = functions["forward"]
        self._placeholders(forward)
        for statement in forward.body:
            self._statement(statement)
        if not any(node.op == "output" for node in self._graph.nodes):
            raise ProgramError(f"{self._where}: forward returns nothing: the file is truncated")
        return fx.GraphModule(self._root, self._graph, class_name="Artifact"), self._groups()

    def _import(self) -> None:
        """Define the ops of all dialects, and import the modules of torch that the file imports: some define ops."""
        define_ops()
        for statement in self._tree.body:
            for alias in statement.names if isinstance(statement, ast.Import) else ():
                if alias.name.startswith("torch."):
                    with contextlib.suppress(ImportError):
                        importlib.import_module(alias.name)

    def _fail(self, at: ast.AST, message: str, hint: str | None = None) -> NoReturn:
        raise ProgramError(f"{self._where}, line {getattr(at, 'lineno', '?')}: {message}", hint)

    def _class(self) -> ast.ClassDef:
        found = [one for one in self._tree.body if isinstance(one, ast.ClassDef)]
        if len(found) != 1:
            raise ProgramError(f"{self._where} holds {len(found)} classes; a graph is one", "give a file of one graph")
        return found[0]

    # ------------------------------------------------------------------------------------------------------- inputs

    def _placeholders(self, forward: ast.FunctionDef) -> None:
        arguments = [a for a in (*forward.args.posonlyargs, *forward.args.args) if a.arg != "self"]
        known = self._loaded()
        if known is not None and len(known) != len(arguments):
            self._fail(forward, f"forward takes {len(arguments)} inputs, but load_args describes {len(known)}")
        for number, argument in enumerate(arguments):
            value = known[number] if known is not None else self._annotated(argument)
            node = self._graph.placeholder(argument.arg)
            node.meta["val"] = value
            self._names[argument.arg] = node

    def _annotated(self, argument: ast.arg) -> Any:
        text = argument.annotation.value if isinstance(argument.annotation, ast.Constant) else None
        match = _ANNOTATED.match(text) if isinstance(text, str) else None
        if match is None or match[1] not in _DTYPES:
            if isinstance(text, str) and match is None and "[" not in text:
                return None  # no tensor: nothing reads it
            self._fail(
                argument,
                f"the shape of input '{argument.arg}' is unknown",
                "give a file with load_args (fx_graph_runnable), or with annotations (print_readable)",
            )
        sizes, strides = (
            [int(part) for part in text.split(",") if part.strip()] if text is not None and _numbers(text) else None
            for text in (match[2], match[3])
        )
        if sizes is None:
            self._fail(
                argument,
                f"input '{argument.arg}' has symbolic sizes: {match[0]}",
                "compile with dynamic=False",
            )
        return _fake(sizes, strides, 0, _DTYPES[match[1]])

    def _loaded(self) -> list[Any] | None:
        """What `load_args` says about the inputs; None if there is none."""
        function = next((f for f in self._tree.body if isinstance(f, ast.FunctionDef) and f.name == "load_args"), None)
        if function is None:
            return None
        found: list[Any] = []
        for statement in function.body:
            call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            args = [self._value(a) for a in call.args if not (isinstance(a, ast.Name) and a.id not in self._names)]
            kwargs = {k.arg: self._value(k.value) for k in call.keywords if k.arg is not None}
            if call.func.attr == "storage":
                continue
            if call.func.attr == "tensor":
                shape, *rest = args
                strides = kwargs.get("stride", rest[0] if rest else None)
                dtype = kwargs.get("dtype") or torch.float32
                found.append(_fake(shape, strides, kwargs.get("storage_offset") or 0, dtype))
            elif call.func.attr == "symint":
                found.append(args[0] if args else None)
            else:  # const, opaque, unsupported, generator: no tensor
                found.append(None)
        return found

    # -------------------------------------------------------------------------------------------------- attributes

    def _attribute(self, statement: ast.stmt) -> None:
        """A parameter, buffer or constant that `__init__` makes; modules are left for who reads them to refuse."""
        name, value = None, None
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
            name, value = statement.targets[0].attr, statement.value
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if isinstance(call.func, ast.Attribute) and call.func.attr == "register_buffer":
                name, value = getattr(call.args[0], "value", None), call.args[1]
        if not isinstance(name, str) or value is None:
            return
        made = self._constant(value)
        if isinstance(made, torch.nn.Parameter):
            self._root.register_parameter(name, made)
        elif isinstance(made, torch.Tensor):
            self._root.register_buffer(name, made)

    def _constant(self, value: ast.expr) -> Any:
        """The value of a constant: real where it is written out, else a fake tensor, which takes no memory."""
        if not isinstance(value, ast.Call):
            return self._value(value)
        if isinstance(value.func, ast.Attribute) and value.func.attr in ("to", "cuda", "cpu", "contiguous"):
            return self._constant(value.func.value)
        function = _CONSTANTS.get(ast.unparse(value.func))
        if function is None:
            return None
        args = [self._constant(one) for one in value.args]
        kwargs = {k.arg: self._constant(k.value) for k in value.keywords if k.arg not in (None, "device")}
        if function in (torch.tensor, list, torch.nn.Parameter):
            return function(*args, **kwargs)
        with new_fake_mode():
            return function(*args, **kwargs)

    # ------------------------------------------------------------------------------------------------------- calls

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Return):
            self._graph.output(self._value(statement.value) if statement.value is not None else None)
        elif isinstance(statement, ast.Assign):
            value = self._value(statement.value, self._wanted(statement.targets[0]))
            for target in statement.targets:
                self._bind(target, value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._bind(statement.target, self._value(statement.value, self._wanted(statement.target)))
        elif isinstance(statement, ast.Expr):
            if not isinstance(statement.value, ast.Constant):  # a docstring
                self._value(statement.value)
        elif not isinstance(statement, (ast.Delete, ast.Pass)):
            self._fail(statement, f"a graph cannot contain '{ast.unparse(statement).splitlines()[0]}'")

    @staticmethod
    def _wanted(target: ast.expr) -> str | None:
        return target.id if isinstance(target, ast.Name) else None

    def _bind(self, target: ast.expr, value: Any) -> None:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        for number, name in enumerate(names):
            if not isinstance(name, ast.Name):
                self._fail(target, f"'{ast.unparse(target)}' is assigned to")
            part = (
                value
                if not isinstance(target, ast.Tuple)
                else self._call(operator.getitem, (value, number), {}, name.id)
            )
            self._names[name.id] = part

    def _call(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str | None = None) -> fx.Node:
        node = self._graph.create_node("call_function", target, tuple(args), kwargs, name)
        return node

    def _value(self, at: ast.expr, name: str | None = None) -> Any:
        """The value of an expression: a node for a call on tensors, else what it says."""
        if isinstance(at, ast.Constant):
            return at.value
        if isinstance(at, ast.Name):
            if at.id not in self._names:
                self._fail(at, f"'{at.id}' is not defined before it is read")
            return self._names[at.id]
        if isinstance(at, (ast.Tuple, ast.List)):
            made = [self._value(one) for one in at.elts]
            return tuple(made) if isinstance(at, ast.Tuple) else made
        if isinstance(at, ast.Dict):
            return {self._value(k): self._value(v) for k, v in zip(at.keys, at.values, strict=True) if k is not None}
        if isinstance(at, ast.Attribute):
            return self._member(at)
        if isinstance(at, ast.Call):
            return self._called(at, name)
        return self._computed(at, name)

    def _computed(self, at: ast.expr, name: str | None) -> Any:
        """The value of an expression with operators; those on nodes are calls of Python's operators."""
        function: Callable[..., Any]
        if isinstance(at, ast.UnaryOp) and isinstance(at.op, ast.USub):
            operands, function = [self._value(at.operand)], operator.neg
        elif isinstance(at, ast.BinOp) and type(at.op) in _BINARY:
            operands, function = [self._value(at.left), self._value(at.right)], _BINARY[type(at.op)]
        elif isinstance(at, ast.Compare) and len(at.ops) == 1 and type(at.ops[0]) in _COMPARED:
            operands, function = [self._value(at.left), self._value(at.comparators[0])], _COMPARED[type(at.ops[0])]
        elif isinstance(at, ast.Subscript):
            operands, function = [self._value(at.value), self._value(at.slice)], operator.getitem
        elif isinstance(at, ast.Slice):
            parts = [None if part is None else self._value(part) for part in (at.lower, at.upper, at.step)]
            return slice(*parts)
        else:
            self._fail(at, f"a graph cannot contain '{ast.unparse(at)}'")
        if any(isinstance(one, fx.Node) for one in operands):
            return self._call(function, operands, {}, name)
        try:
            return function(*operands)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            self._fail(at, f"'{ast.unparse(at)}' cannot be computed: {error}")

    def _member(self, at: ast.Attribute) -> Any:
        if isinstance(at.value, ast.Name) and at.value.id == "self":
            if not hasattr(self._root, at.attr):
                self._fail(
                    at, f"the graph reads self.{at.attr}, a module or a constant that is not in the file",
                    "compile without ops that create submodules (control flow, user-defined Triton kernels)",
                )  # fmt: skip
            if at.attr not in self._attributes:
                self._attributes[at.attr] = self._graph.get_attr(at.attr)
            return self._attributes[at.attr]
        owner = self._value(at.value)
        if isinstance(owner, fx.Node):
            self._fail(at, f"'{ast.unparse(at)}' reads an attribute of a tensor")
        try:
            return getattr(owner, at.attr)
        except (AttributeError, RuntimeError):
            self._fail(
                at, f"this torch ({torch.__version__}) has no '{ast.unparse(at)}'",
                "import what defines it with --extension, or read the file with the torch that wrote it",
            )  # fmt: skip

    def _called(self, at: ast.Call, name: str | None) -> Any:
        text = ast.unparse(at.func)
        args = [self._value(one) for one in at.args]
        kwargs = {one.arg: self._value(one.value) for one in at.keywords if one.arg is not None}
        if text in ("device", "torch.device"):
            return torch.device("cpu")  # where the program runs
        if text == "slice":
            return slice(*args)
        if text == "getattr" and len(args) == 2:
            return self._member(ast.copy_location(ast.Attribute(at.args[0], str(args[1]), ast.Load()), at))
        if isinstance(at.func, ast.Attribute) and not text.startswith(("torch.", "operator.", "math.")):
            if ast.unparse(at.func.value) == "self":
                self._member(at.func)
            owner = self._value(at.func.value)
            if isinstance(owner, fx.Node):
                return self._graph.create_node("call_method", at.func.attr, (owner, *args), kwargs, name)
        return self._call(self._function(at, text), args, kwargs, name)

    def _function(self, at: ast.Call, text: str) -> Any:
        for module in (operator, math):
            if text.startswith(f"{module.__name__}."):
                return getattr(module, text.partition(".")[2])
        if text.startswith("torch."):
            return self._value(at.func)
        self._fail(at, f"'{text}' is called, but the file does not define it")

    # ------------------------------------------------------------------------------------------------------ groups

    def _groups(self) -> dict[str, GroupSize]:
        """The process groups that the file sets up when it is run as a script."""
        groups: dict[str, GroupSize] = {}
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            if called == "setup_fake_process_groups" and node.args:
                said = ast.literal_eval(node.args[0])
                groups.update({str(k): GroupSize(int(v["size"]), int(v["rank"])) for k, v in said.items()})
        return groups


def _numbers(text: str) -> bool:
    return all(part.strip().isdigit() for part in text.split(",") if part.strip())


def _fake(shape: Sequence[int], strides: Sequence[int] | None, offset: int, dtype: torch.dtype) -> torch.Tensor:
    with new_fake_mode():
        if strides is None:
            return torch.empty(tuple(shape), dtype=dtype)
        size = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        whole = torch.empty((max(size, 1),), dtype=dtype)
        return whole.as_strided(tuple(shape), tuple(strides), offset)


__all__ = ["SUFFIXES", "ArtifactText", "place_of", "read_artifact", "texts_in"]
