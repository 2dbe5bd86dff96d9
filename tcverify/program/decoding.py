"""Reads programs from JSON-able data. Nothing is imported, unpickled or evaluated: ops are names in the dialect tables."""

from __future__ import annotations

from typing import Any, cast

from torch import fx

from tcverify.errors import ProgramError
from tcverify.ops import TensorSpec, gives_more, lookup, resolve
from tcverify.ops.leaves import leaves
from tcverify.program.graph import KEPT_META, RankBinding, RankConstant, add_node
from tcverify.program.inputs import InputSpec, Recipe, RecipeKind, Sources
from tcverify.program.mesh import Mesh, MeshDim
from tcverify.program.pass_options import read_options
from tcverify.program.placement import Placement
from tcverify.program.program import Program
from tcverify.program.stream_options import StreamSettings
from tcverify.program.values import MAX_DEPTH, ValueReader, read_int, read_keys, read_list, read_sizes, read_text
from tcverify.registry.choices import SIZES, is_one_of

FORMAT = "tcverify-program"
VERSION = 1
MAX_NODES = 200_000
MAX_EXTENT = 1 << 48

_NODE_KEYS = frozenset({"name", "op", "target", "args", "kwargs", "val", "meta"})
_SPEC_KEYS = frozenset({"shape", "stride", "dtype", "offset", "alias", "tuple", "list", "scalar"})


class Reader(ValueReader):
    """Reads the parts of a program; see `codec.decode`."""

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
        read_keys(data, (*allowed, "streams", "options", "sizes"), self.where)
        missing = [key for key in allowed if key not in data]
        if missing:
            raise ProgramError(f"{self.where} lacks {', '.join(missing)}")
        sources = self.sources(data)
        graphs = tuple(self.graph(g, i) for i, g in enumerate(read_list(data["graphs"], "graphs")))
        ranks = self.ranks(data["ranks"])
        labels = tuple(read_text(label, "a label") for label in read_list(data["labels"], "labels"))
        streams = self.streams(data["streams"]) if "streams" in data else None
        options = read_options(data.get("options", {}))
        sizes = data.get("sizes", "auto")
        if not is_one_of(sizes, SIZES):
            raise ProgramError(f"{self.where}: there are no sizes {sizes!r}", f"sizes are {', '.join(SIZES)}")
        parts = sources.mesh, graphs, ranks, sources.inputs, sources.seed, labels
        program = Program(*parts, streams=streams, options=options, sizes=sizes)
        self.check_constants(program)
        for spec in program.inputs:
            for name, _ in spec.placements:
                program.mesh.dim(name)
            spec.bounds(program.mesh, 0)  # raises for a shard of a dim that the input does not have
        return program

    def streams(self, data: Any) -> StreamSettings:
        record = read_keys(data, ("compute", "comm", "sync_overhead_s", "device"), "streams")
        overhead, device = record["sync_overhead_s"], record["device"]
        if type(overhead) not in (int, float) or not 0 <= overhead < 1e6:
            raise ProgramError("streams.sync_overhead_s is not a number of seconds")
        compute, comm = (
            tuple(read_int(i, "a stream", 0) for i in read_list(record[role], f"the {role} streams"))
            for role in ("compute", "comm")
        )
        named = None if device is None else read_text(device, "streams.device")
        return StreamSettings(compute, comm, float(overhead), named)

    def sources(self, data: Any) -> Sources:
        """Read what `encode_sources` wrote."""
        mesh = read_keys(data["mesh"], ("world_size", "dims"), "mesh")
        world_size = read_int(mesh["world_size"], "mesh.world_size", 1)
        dims = tuple(self.mesh_dim(d) for d in read_list(mesh["dims"], "mesh.dims"))
        inputs = tuple(self.input(i) for i in read_list(data["inputs"], "inputs"))
        return Sources(Mesh(world_size, dims), inputs, read_int(data["seed"], "seed", 0, (1 << 63) - 1))

    def ranks(self, data: Any) -> tuple[RankBinding, ...]:
        """Read what `encode_ranks` wrote."""
        return tuple(self.binding(r, i) for i, r in enumerate(read_list(data, "ranks")))

    def mesh_dim(self, data: Any) -> MeshDim:
        record = read_keys(data, ("name", "groups"), "a mesh dim")
        groups = tuple(
            tuple(read_int(r, "a rank of a group", 0) for r in read_list(g, "a group"))
            for g in read_list(record["groups"], "groups")
        )
        return MeshDim(read_text(record["name"], "the name of a mesh dim"), groups)

    def input(self, data: Any) -> InputSpec:
        record = read_keys(data, ("name", "shape", "dtype", "placements", "recipe"), "an input")
        name = read_text(record["name"], "the name of an input")
        recipe = self.recipe(record["recipe"], name)
        placements = []
        for pair in read_list(record["placements"], f"the placements of input '{name}'"):
            dim, placement = read_list(pair, f"a placement of input '{name}'")
            placements.append((read_text(dim, "a mesh dim"), Placement.parse(read_text(placement, "a placement"))))
        shape = tuple(read_int(s, f"a size of input '{name}'", 0) for s in read_list(record["shape"], "a shape"))
        return InputSpec(
            name,
            shape,
            self.dtype(record["dtype"]),
            tuple(placements),
            recipe,
        )

    def recipe(self, data: Any, name: str) -> Recipe:
        """Read the recipe of the values of input `name`."""
        record = read_keys(data, ("kind", "scale", "values"), f"the recipe of input '{name}'")
        scale = record["scale"]
        if type(scale) not in (int, float):
            raise ProgramError(f"the scale of input '{name}' is not a number")
        kind = cast(RecipeKind, read_text(record["kind"], "a recipe"))  # `Recipe` refuses other words
        return Recipe(kind, float(scale), self.given(record.get("values", []), name))

    def given(self, data: Any, name: str) -> tuple[float, ...]:
        """Read given values of an input: numbers and booleans."""
        values = tuple(self.value(v, {}, f"input '{name}'") for v in read_list(data, f"the values of input '{name}'"))
        if not all(isinstance(value, (int, float)) for value in values):
            raise ProgramError(f"input '{name}' is given a value that is not a number")
        return values

    def binding(self, data: Any, rank: int) -> RankBinding:
        record = read_keys(data, ("graph", "constants"), f"rank {rank}")
        constants = read_keys(record["constants"], record["constants"], f"the constants of rank {rank}")
        for name, value in constants.items():
            where = f"rank constant '{name}' of rank {rank}"
            for integer in value if isinstance(value, list) else [value]:
                read_int(integer, where, -(1 << 63), (1 << 63) - 1)
        return RankBinding(read_int(record["graph"], f"the graph of rank {rank}", 0), constants)

    def graph(self, data: Any, index: int) -> fx.Graph:
        records = read_list(read_keys(data, ("nodes",), f"graph {index}")["nodes"], f"the nodes of graph {index}")
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
        record = read_keys(data, _NODE_KEYS, "a node")
        name = read_text(record["name"], "the name of a node")
        where = f"node '{name}'"
        op, target_name = record["op"], read_text(record["target"], f"the target of {where}")
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
        args = tuple([self.value(a, nodes, where) for a in read_list(record["args"], f"the arguments of {where}")])
        kwargs: dict[str, Any] = {}
        if "kwargs" in record:
            raw = record["kwargs"]
            kwargs = {
                k: self.value(v, nodes, where)
                for k, v in read_keys(raw, raw, f"the keyword arguments of {where}").items()
            }
        if op == "call_function" and gives_more(lookup(target), args, kwargs):
            raise ProgramError(f"{where} gives {target_name} an argument that it does not take")
        node = add_node(graph, op, target, args, kwargs, name)
        if node.name != name or name in nodes:
            raise ProgramError(f"{where}: the name is taken or is not a Python identifier")
        if "val" in record:
            node.meta["val"] = self.spec(record["val"], where)
        if "meta" in record:
            meta = read_keys(record["meta"], KEPT_META, f"the metadata of {where}")
            node.meta.update((key, self.value(value, nodes, where)) for key, value in meta.items())
        nodes[name] = node

    def spec(self, data: Any, where: str, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise ProgramError(f"{where} is nested too deeply")
        record = read_keys(data, _SPEC_KEYS, f"val of {where}")
        if "shape" not in record:
            for container, make in (("tuple", tuple), ("list", list)):
                if container in record:
                    return make(
                        [self.spec(s, where, depth + 1) for s in read_list(record[container], f"val of {where}")]
                    )
            if "scalar" in record:
                return self.value(record["scalar"], {}, where)
        shape = read_sizes(record["shape"], f"shape of {where}", f"size of {where}")
        stride = read_sizes(record["stride"], f"stride of {where}", f"stride of {where}")
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
            alias = read_int(alias, f"the alias of {where}", 0)
        offset = record.get("offset", 0)
        return TensorSpec(shape, stride, self.dtype(record["dtype"]), read_int(offset, "an offset", 0), alias)

    def check_constants(self, program: Program) -> None:
        """Every rank gives a value to every rank constant of its graph."""
        needed = [_constants_of(graph) for graph in program.graphs]
        for rank, binding in enumerate(program.ranks):
            missing = needed[binding.graph] - set(binding.constants)
            if missing:
                raise ProgramError(f"{self.where}: rank {rank} gives no value to {', '.join(sorted(missing))}")


def _constants_of(graph: fx.Graph) -> set[str]:
    return {one.name for node in graph.nodes for one in leaves((node.args, node.kwargs), RankConstant)}
