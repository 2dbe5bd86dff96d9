"""Programs as versioned JSON.

Round-trips exactly. Reading is safe: ops are names in the dialect tables, nothing is imported, unpickled or
evaluated, and any defect of a file becomes a `ProgramError` with its location.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from dataclasses import asdict, replace
from typing import Any

from torch import fx

from tcverify.errors import ProgramError, TcverifyError, UnsupportedOp
from tcverify.ops import TensorSpec, gives_more, lookup, qualified_name, resolve
from tcverify.ops.leaves import leaves
from tcverify.program.decoding import FORMAT, VERSION, Reader
from tcverify.program.graph import KEPT_META
from tcverify.program.inputs import Recipe, Sources
from tcverify.program.program import Program
from tcverify.program.values import MAX_TEXT, NotSerialisable, dtype_name, encode_value

MAX_BYTES = 64 << 20

# ------------------------------------------------------------------------------------------------------------ writing


def dumps(program: Program) -> str:
    """Write a program as one line of JSON, equal for equal programs.

    Raises:
        NotSerialisable: a graph contains an object that JSON cannot represent.
    """
    text = _TEXTS.get(program)
    if text is None:
        text = _TEXTS[program] = json.dumps(encode(program), separators=(",", ":"), allow_nan=False)
    return text


#: Cache of what `dumps` has written, for the lifetime of the program: its id, its file and its messages use the same text.
_TEXTS: weakref.WeakKeyDictionary[Program, str] = weakref.WeakKeyDictionary()


def encode(program: Program) -> dict[str, Any]:
    """Write a program as JSON-able data. Raises as `dumps` does. The order of keys affects `program_id`: keep it."""
    sources = encode_sources(program.sources)
    record = {
        "format": FORMAT,
        "version": VERSION,
        "mesh": sources["mesh"],
        "inputs": sources["inputs"],
        "graphs": [encode_graph(graph) for graph in program.graphs],
        "ranks": encode_ranks(program),
        "seed": sources["seed"],
        "labels": list(program.labels),
    }
    if program.streams is not None:
        record["streams"] = asdict(program.streams)
    if program.options:
        record["options"] = dict(program.options)
    if program.sizes == "real" and replace(program, sizes="auto").large:
        record["sizes"] = "real"  # else they are its own in any case
    return record


def encode_sources(sources: Sources) -> dict[str, Any]:
    """Write mesh, inputs and seed as JSON-able data."""
    return {
        "mesh": {
            "world_size": sources.mesh.world_size,
            "dims": [{"name": d.name, "groups": [list(g) for g in d.groups]} for d in sources.mesh.dims],
        },
        "inputs": [
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "dtype": dtype_name(spec.dtype),
                "placements": [[dim, str(placement)] for dim, placement in spec.placements],
                "recipe": encode_recipe(spec.recipe),
            }
            for spec in sources.inputs
        ],
        "seed": sources.seed,
    }


def encode_recipe(recipe: Recipe) -> dict[str, Any]:
    record: dict[str, Any] = {"kind": recipe.kind, "scale": recipe.scale}
    if recipe.values:
        record["values"] = [encode_value(value) for value in recipe.values]
    return record


def encode_ranks(program: Program) -> list[dict[str, Any]]:
    """Write what each rank runs as JSON-able data."""
    return [
        {"graph": b.graph, "constants": {k: encode_value(v) for k, v in b.constants.items()}} for b in program.ranks
    ]


def program_id(program: Program) -> str:
    """Return the hash of a program's content: 16 hexadecimal digits."""
    return hashlib.sha256(dumps(program).encode()).hexdigest()[:16]


def encode_graph(graph: fx.Graph) -> dict[str, Any]:
    """Write a graph of a program as JSON-able data. Raises as `dumps` does."""
    return {"nodes": _encode_nodes(graph)}


def _encode_nodes(graph: fx.Graph) -> list[dict[str, Any]]:
    """Write nodes in order. Anything that no reader would accept is refused here, where it can still become a finding."""
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
    for named in leaves(value, fx.Node):
        if named.name not in known:
            raise NotSerialisable(
                f"meta['{key}'] of node '{node.name}' names '{named.name}', which is not defined before it"
            )


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
            "args": [encode_value(a) for a in node.args],
        }
        if node.kwargs:
            record["kwargs"] = {k: encode_value(v) for k, v in node.kwargs.items()}
        meta = {key: encode_value(node.meta[key]) for key in KEPT_META if key in node.meta}
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
            "dtype": dtype_name(spec.dtype),
        }
        if spec.offset:
            record["offset"] = spec.offset
        if spec.alias is not None:
            record["alias"] = spec.alias
        return record
    if isinstance(spec, (tuple, list)):
        return {"tuple" if isinstance(spec, tuple) else "list": [_encode_spec(s) for s in spec]}
    return {"scalar": encode_value(spec)}


# ------------------------------------------------------------------------------------------------------------ reading


def loads(text: str | bytes, where: str = "program") -> Program:
    """Read a program.

    Args:
        where: the name of the source for errors, e.g. the file's path.

    Raises:
        ProgramError: the text is not a valid program; the message says where.
    """
    return decode(load_json(text, where), where)


def load_json(text: str | bytes, where: str) -> Any:
    """Parse JSON of bounded size and depth, refusing duplicate keys and non-finite numbers.

    Raises:
        ProgramError: it is not valid under these rules.
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
        return Reader(where).program(data)
    except UnsupportedOp as error:
        hint = "only ops of the dialect tables are loaded; --extension names a module that registers more"
        raise ProgramError(f"{where}: {error.message}", hint) from error
    except TcverifyError as error:
        if error.message.startswith(where):
            raise
        raise ProgramError(f"{where}: {error.message}", error.hint) from None
    except RecursionError:
        raise ProgramError(f"{where} is nested too deeply") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise ProgramError(f"{where}: malformed program: {type(error).__name__}: {error}") from None
