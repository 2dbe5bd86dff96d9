"""Programs as versioned JSON.

Round-trips exactly. Reading loads nothing: ops are names that the dialect tables must know, nothing is imported, unpickled
or evaluated, and whatever is wrong with a file becomes one `ProgramError` that says where.
"""

from __future__ import annotations

import hashlib
import json
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from tcverify.errors import ProgramError, TcverifyError, UnsupportedOp
from tcverify.ops import TensorSpec, gives_more, lookup, qualified_name, resolve
from tcverify.program.graph import KEPT_META, RankBinding, RankConstant, add_node
from tcverify.program.inputs import InputSpec, Recipe
from tcverify.program.mesh import Mesh, MeshDim
from tcverify.program.placement import Placement
from tcverify.program.program import Program

FORMAT = "tcverify-program"
VERSION = 1
MAX_BYTES = 64 << 20
MAX_NODES = 200_000
MAX_DEPTH = 64
MAX_TEXT = 1000
MAX_EXTENT = 1 << 48

_DTYPES = {
    name: d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and not (name := str(d).removeprefix("torch.")).startswith(("quint", "qint", "bits"))
}
_LAYOUTS = {"strided": torch.strided}
_MEMORY_FORMATS = {
    str(m).removeprefix("torch."): m
    for m in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}


class NotSerialisable(TcverifyError):
    """A graph holds something that program files cannot: a submodule, an attribute, a foreign function or object."""


# ------------------------------------------------------------------------------------------------------------ writing


def dumps(program: Program) -> str:
    """Write a program as one line of JSON, equal for equal programs.

    Raises:
        NotSerialisable: a graph holds what JSON cannot.
    """
    text = _TEXTS.get(program)
    if text is None:
        text = _TEXTS[program] = json.dumps(encode(program), separators=(",", ":"), allow_nan=False)
    return text


#: What `dumps` has written, for as long as the program lives: its id, its file and its messages are made from one text.
_TEXTS: weakref.WeakKeyDictionary[Program, str] = weakref.WeakKeyDictionary()


def encode(program: Program) -> dict[str, Any]:
    """Write a program as JSON-able data. Raises as `dumps` does."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "mesh": {
            "world_size": program.world_size,
            "dims": [{"name": d.name, "groups": [list(g) for g in d.groups]} for d in program.mesh.dims],
        },
        "inputs": [
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "dtype": _dtype_name(spec.dtype),
                "placements": [[dim, str(placement)] for dim, placement in spec.placements],
                "recipe": {"kind": spec.recipe.kind, "scale": spec.recipe.scale},
            }
            for spec in program.inputs
        ],
        "graphs": [{"nodes": _encode_nodes(graph)} for graph in program.graphs],
        "ranks": [
            {"graph": b.graph, "constants": {k: _encode_value(v) for k, v in b.constants.items()}}
            for b in program.ranks
        ],
        "seed": program.seed,
        "labels": list(program.labels),
    }


def program_id(program: Program) -> str:
    """Return the hash of a program's content: 16 hexadecimal digits."""
    return hashlib.sha256(dumps(program).encode()).hexdigest()[:16]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _encode_nodes(graph: fx.Graph) -> list[dict[str, Any]]:
    """Write nodes in order. What no reader would take is refused here, where a finding can still be made of it."""
    known: set[str] = set()
    records = []
    for node in graph.nodes:
        records.append(_encode_node(node))
        if len(node.name) > MAX_TEXT:
            raise NotSerialisable(f"node '{node.name[:40]}…' has a name of {len(node.name)} characters")
        for key, value in node.meta.items():
            if key in KEPT_META:
                _refuse_strangers(node, key, value, known)
        known.add(node.name)
    return records


def _refuse_strangers(node: fx.Node, key: str, value: Any, known: set[str]) -> None:
    """Metadata may name nodes; files hold earlier ones only."""

    def look(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node) and leaf.name not in known:
            raise NotSerialisable(
                f"meta['{key}'] of node '{node.name}' names '{leaf.name}', which is not defined before it"
            )
        return leaf

    fx.node.map_aggregate(value, look)


def _encode_node(node: fx.Node) -> dict[str, Any]:
    if node.op == "call_function":
        target = qualified_name(node.target)
        try:
            resolve(target)
        except UnsupportedOp as error:
            raise NotSerialisable(f"node '{node.name}' calls {target}: {error.reason}") from None
        if gives_more(lookup(node.target), node.args, node.kwargs):
            raise NotSerialisable(f"node '{node.name}' gives {target} an argument that has no meaning here")
    elif node.op in ("placeholder", "output"):
        target = ""
    else:
        raise NotSerialisable(f"node '{node.name}' is a {node.op} of '{node.target}'")
    try:
        record: dict[str, Any] = {
            "name": node.name,
            "op": node.op,
            "target": target,
            "args": [_encode_value(a) for a in node.args],
        }
        if node.kwargs:
            record["kwargs"] = {k: _encode_value(v) for k, v in node.kwargs.items()}
        meta = {key: _encode_value(node.meta[key]) for key in KEPT_META if key in node.meta}
    except NotSerialisable as error:
        raise NotSerialisable(f"node '{node.name}': {error.message}") from None
    if "val" in node.meta:
        record["val"] = _encode_spec(node.meta["val"])
    if meta:
        record["meta"] = meta
    return record


def _encode_spec(spec: Any) -> Any:
    if isinstance(spec, TensorSpec):
        record: dict[str, Any] = {
            "shape": list(spec.shape),
            "stride": list(spec.stride),
            "dtype": _dtype_name(spec.dtype),
        }
        if spec.offset:
            record["offset"] = spec.offset
        if spec.alias is not None:
            record["alias"] = spec.alias
        return record
    if isinstance(spec, (tuple, list)):
        return {"tuple" if isinstance(spec, tuple) else "list": [_encode_spec(s) for s in spec]}
    return {"scalar": _encode_value(spec)}


def _encode_value(value: Any, depth: int = 0) -> Any:
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
    if isinstance(value, list):
        return [_encode_value(v, depth + 1) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [_encode_value(v, depth + 1) for v in value]}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": [[k, _encode_value(v, depth + 1)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_encode_value(v, depth + 1) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.dtype):
        return {"dtype": _dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.layout) and value is torch.strided:
        return {"layout": "strided"}
    if isinstance(value, torch.memory_format):
        return {"memory_format": str(value).removeprefix("torch.")}
    if value is Ellipsis:
        return {"ellipsis": True}
    raise NotSerialisable(f"the constant {value!r} of type {type(value).__name__} cannot be written to a program file")


# ------------------------------------------------------------------------------------------------------------ reading


def loads(text: str | bytes, where: str = "program") -> Program:
    """Read a program.

    Args:
        where: names the source in errors, e.g. the file's path.

    Raises:
        ProgramError: whatever is wrong with it.
    """
    return decode(load_json(text, where), where)


def load_json(text: str | bytes, where: str) -> Any:
    """Parse JSON of bounded size and depth, refusing duplicate keys and non-finite numbers.

    Raises:
        ProgramError: it is not such JSON.
    """
    if len(text) > MAX_BYTES:
        raise ProgramError(f"{where} has {len(text)} bytes; at most {MAX_BYTES} are read")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise ProgramError(f"{where}: an object names a key twice")
        return found

    def constant(name: str) -> Any:
        raise ProgramError(f"{where}: {name} is not JSON")

    try:
        data = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError:
        raise ProgramError(f"{where} is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ProgramError(
            f"{where} is not JSON: {error}", "the file may be truncated or not a tcverify file"
        ) from None
    return data


def decode(data: Any, where: str = "program") -> Program:
    """Read a program from JSON-able data. Raises as `loads` does."""
    try:
        return _Reader(where).program(data)
    except UnsupportedOp as error:
        raise ProgramError(f"{where}: {error.message}", "only ops of the dialect tables are loaded") from None
    except TcverifyError as error:
        if error.message.startswith(where):
            raise
        raise ProgramError(f"{where}: {error.message}", error.hint) from None
    except RecursionError:
        raise ProgramError(f"{where} is nested too deeply") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise ProgramError(f"{where}: malformed program: {type(error).__name__}: {error}") from None


_NODE_KEYS = frozenset({"name", "op", "target", "args", "kwargs", "val", "meta"})
_SPEC_KEYS = frozenset({"shape", "stride", "dtype", "offset", "alias", "tuple", "list", "scalar"})


def _keys(record: Any, allowed: Iterable[str], where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ProgramError(f"{where} is not an object")
    if not record.keys() <= (allowed if isinstance(allowed, frozenset) else set(allowed)):
        unknown = sorted(set(record) - set(allowed))
        raise ProgramError(f"{where} has unknown keys {', '.join(unknown)}")
    return record


def _int(value: Any, where: str, low: int, high: int = 1 << 40) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ProgramError(f"{where} is {value!r}, not an integer from {low} to {high}")
    return value


def _text(value: Any, where: str) -> str:
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise ProgramError(f"{where} is not a short printable string")
    return value


def _sizes(value: Any, whole: str, one: str) -> tuple[int, ...]:
    """Read sizes or strides."""
    for size in _list(value, f"the {whole}"):
        if type(size) is not int or not 0 <= size <= 1 << 40:
            _int(size, f"a {one}", 0)
    return tuple(value)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProgramError(f"{where} is not a list")
    return value


class _Reader:
    def __init__(self, where: str) -> None:
        self.where = where

    def program(self, data: Any) -> Program:
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ProgramError(f"{self.where} is not a tcverify program", f'its "format" must be "{FORMAT}"')
        version = data.get("version")
        if type(version) is not int or version != VERSION:
            raise ProgramError(
                f"{self.where} has version {version!r}; this tcverify reads version {VERSION}",
                "use the tcverify that wrote it, or write it again",
            )
        allowed = ("format", "version", "mesh", "inputs", "graphs", "ranks", "seed", "labels")
        _keys(data, allowed, self.where)
        missing = [key for key in allowed if key not in data]
        if missing:
            raise ProgramError(f"{self.where} lacks {', '.join(missing)}")
        mesh = _keys(data["mesh"], ("world_size", "dims"), "mesh")
        world_size = _int(mesh["world_size"], "mesh.world_size", 1)
        dims = tuple(self.mesh_dim(d) for d in _list(mesh["dims"], "mesh.dims"))
        inputs = tuple(self.input(i) for i in _list(data["inputs"], "inputs"))
        graphs = tuple(self.graph(g, i) for i, g in enumerate(_list(data["graphs"], "graphs")))
        ranks = tuple(self.binding(r, i) for i, r in enumerate(_list(data["ranks"], "ranks")))
        labels = tuple(_text(label, "a label") for label in _list(data["labels"], "labels"))
        seed = _int(data["seed"], "seed", 0, (1 << 63) - 1)
        program = Program(Mesh(world_size, dims), graphs, ranks, inputs, seed, labels)
        self.check_constants(program)
        for spec in inputs:
            for name, _ in spec.placements:
                program.mesh.dim(name)
            spec.bounds(program.mesh, 0)  # raises for a shard of a dim that the input does not have
        return program

    def mesh_dim(self, data: Any) -> MeshDim:
        record = _keys(data, ("name", "groups"), "a mesh dim")
        groups = tuple(
            tuple(_int(r, "a rank of a group", 0) for r in _list(g, "a group"))
            for g in _list(record["groups"], "groups")
        )
        return MeshDim(_text(record["name"], "the name of a mesh dim"), groups)

    def input(self, data: Any) -> InputSpec:
        record = _keys(data, ("name", "shape", "dtype", "placements", "recipe"), "an input")
        name = _text(record["name"], "the name of an input")
        recipe = _keys(record["recipe"], ("kind", "scale"), f"the recipe of input '{name}'")
        scale = recipe["scale"]
        if type(scale) not in (int, float):
            raise ProgramError(f"the scale of input '{name}' is not a number")
        placements = []
        for pair in _list(record["placements"], f"the placements of input '{name}'"):
            dim, placement = _list(pair, f"a placement of input '{name}'")
            placements.append((_text(dim, "a mesh dim"), Placement.parse(_text(placement, "a placement"))))
        shape = tuple(_int(s, f"a size of input '{name}'", 0) for s in _list(record["shape"], "a shape"))
        return InputSpec(
            name,
            shape,
            self.dtype(record["dtype"]),
            tuple(placements),
            Recipe(_text(recipe["kind"], "a recipe"), float(scale)),
        )

    def dtype(self, name: Any) -> torch.dtype:
        if not isinstance(name, str) or name not in _DTYPES:
            raise ProgramError(f"{name!r} is not a dtype")
        return _DTYPES[name]

    def binding(self, data: Any, rank: int) -> RankBinding:
        record = _keys(data, ("graph", "constants"), f"rank {rank}")
        constants = _keys(record["constants"], record["constants"], f"the constants of rank {rank}")
        for name, value in constants.items():
            where = f"rank constant '{name}' of rank {rank}"
            for integer in value if isinstance(value, list) else [value]:
                _int(integer, where, -(1 << 63), (1 << 63) - 1)
        return RankBinding(_int(record["graph"], f"the graph of rank {rank}", 0), constants)

    def graph(self, data: Any, index: int) -> fx.Graph:
        records = _list(_keys(data, ("nodes",), f"graph {index}")["nodes"], f"the nodes of graph {index}")
        if len(records) > MAX_NODES:
            raise ProgramError(f"graph {index} has {len(records)} nodes; at most {MAX_NODES} are read")
        graph = fx.Graph()
        nodes: dict[str, fx.Node] = {}
        for record in records:
            self.node(record, graph, nodes)
        ops = [node.op for node in nodes.values()]
        last = next(reversed(nodes.values()), None)
        if last is None or last.op != "output" or len(last.args) != 1 or ops.count("output") != 1:
            raise ProgramError(f"graph {index} does not end in its one output node")
        return graph

    def node(self, data: Any, graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        record = _keys(data, _NODE_KEYS, "a node")
        name = _text(record["name"], "the name of a node")
        where = f"node '{name}'"
        op, target_name = record["op"], _text(record["target"], f"the target of {where}")
        target: Any
        if op == "call_function":
            target = resolve(target_name)
        elif op == "placeholder":
            before = next(reversed(nodes.values()), None)
            if before is not None and before.op != "placeholder":
                raise ProgramError(f"{where}: placeholders come first")
            target = name
        elif op == "output":
            target = "output"
        else:
            raise ProgramError(f"{where} has op {op!r}; programs hold placeholder, call_function and output nodes")
        args = tuple([self.value(a, nodes, where) for a in _list(record["args"], f"the arguments of {where}")])
        kwargs: dict[str, Any] = {}
        if "kwargs" in record:
            raw = record["kwargs"]
            kwargs = {
                k: self.value(v, nodes, where) for k, v in _keys(raw, raw, f"the keyword arguments of {where}").items()
            }
        node = add_node(graph, op, target, args, kwargs, name)
        if node.name != name or name in nodes:
            raise ProgramError(f"{where}: the name is taken or is not a Python identifier")
        if "val" in record:
            node.meta["val"] = self.spec(record["val"], where)
        if "meta" in record:
            meta = _keys(record["meta"], KEPT_META, f"the metadata of {where}")
            node.meta.update((key, self.value(value, nodes, where)) for key, value in meta.items())
        nodes[name] = node

    def spec(self, data: Any, where: str, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise ProgramError(f"{where} is nested too deeply")
        record = _keys(data, _SPEC_KEYS, f"val of {where}")
        if "shape" not in record:
            for container, make in (("tuple", tuple), ("list", list)):
                if container in record:
                    return make([self.spec(s, where, depth + 1) for s in _list(record[container], f"val of {where}")])
            if "scalar" in record:
                return self.value(record["scalar"], {}, where)
        shape = _sizes(record["shape"], f"shape of {where}", f"size of {where}")
        stride = _sizes(record["stride"], f"stride of {where}", f"stride of {where}")
        if len(shape) != len(stride):
            raise ProgramError(f"{where} has {len(shape)} sizes and {len(stride)} strides")
        elements, reach = 1, 0
        for size, step in zip(shape, stride, strict=True):
            elements *= size or 1
            reach += size * step
        if elements + reach > MAX_EXTENT:
            raise ProgramError(f"{where} is said to have the shape {list(shape)} and stride {list(stride)}: too large")
        alias = record.get("alias")
        if alias is not None:
            alias = _int(alias, f"the alias of {where}", 0)
        offset = record.get("offset", 0)
        return TensorSpec(shape, stride, self.dtype(record["dtype"]), _int(offset, "an offset", 0), alias)

    def value(self, data: Any, nodes: dict[str, fx.Node], where: str, depth: int = 0) -> Any:
        kind_of = type(data)
        if kind_of is dict and len(data) == 1 and type(name := data.get("node")) is str and name in nodes:
            return nodes[name]  # most arguments are nodes
        if depth > MAX_DEPTH:
            raise ProgramError(f"{where} is nested too deeply")
        if data is None or kind_of in (bool, str, float):
            return data
        if kind_of is int:
            return _int(data, f"an argument of {where}", -(1 << 63), (1 << 63) - 1)
        if kind_of is list:
            return [self.value(v, nodes, where, depth + 1) for v in data]
        if not isinstance(data, dict) or len(data) != 1:
            raise ProgramError(f"{where}: {data!r} is not an argument")
        ((kind, inner),) = data.items()
        return self.tagged(kind, inner, nodes, where, depth)

    def tagged(self, kind: str, inner: Any, nodes: dict[str, fx.Node], where: str, depth: int) -> Any:
        if kind == "node":
            if inner not in nodes:
                raise ProgramError(f"{where} reads '{inner}', which is not defined before it")
            return nodes[inner]
        if kind == "rank_constant":
            return RankConstant(_text(inner, f"a rank constant of {where}"))
        if kind == "tuple":
            return tuple(self.value(v, nodes, where, depth + 1) for v in _list(inner, "a tuple"))
        if kind == "dict":
            return {_text(k, "a key"): self.value(v, nodes, where, depth + 1) for k, v in _list(inner, "a dict")}
        if kind == "slice":
            start, stop, step = (self.value(v, nodes, where, depth + 1) for v in _list(inner, "a slice"))
            return slice(start, stop, step)
        if kind == "float" and inner in ("nan", "inf", "-inf"):
            return float(inner)
        if kind == "dtype":
            return self.dtype(inner)
        if kind == "device" and inner in ("cpu", "cuda", "meta"):
            return torch.device(inner)
        if kind == "layout" and inner in _LAYOUTS:
            return _LAYOUTS[inner]
        if kind == "memory_format" and inner in _MEMORY_FORMATS:
            return _MEMORY_FORMATS[inner]
        if kind == "ellipsis":
            return Ellipsis
        raise ProgramError(f"{where}: {kind} {inner!r} is not an argument")

    def check_constants(self, program: Program) -> None:
        """Every rank gives a value to every rank constant of its graph."""
        needed = [_constants_of(graph) for graph in program.graphs]
        for rank, binding in enumerate(program.ranks):
            missing = needed[binding.graph] - set(binding.constants)
            if missing:
                raise ProgramError(f"{self.where}: rank {rank} gives no value to {', '.join(sorted(missing))}")


def _constants_of(graph: fx.Graph) -> set[str]:
    found: set[str] = set()

    def look(value: Any) -> Any:
        if isinstance(value, RankConstant):
            found.add(value.name)
        return value

    for node in graph.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), look)
    return found
