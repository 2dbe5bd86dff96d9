"""DTensor as a pass: from a program of whole tensors, it derives what every rank runs when DTensor shards them.

The program says what is computed, on tensors that are equal on all ranks. Its options say how DTensor is to place them: by name
of a placeholder how it is distributed, by name of another node what its value is redistributed to. A placeholder that the
program reduces at once, over dims of its mesh, is a partial tensor of DTensor, and stays one until DTensor reduces it.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.errors import Unsupported
from tcverify.ops import lookup, mutated_operands, new_fake_mode, qualified_name
from tcverify.program import REPLICATED
from tcverify.program.graph import lazy_module
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.compat import forget_shardings, shardings_untraced
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.groups import groups_of

_ALL_REDUCE = "_c10d_functional::all_reduce"
_WAIT = "_c10d_functional::wait_tensor"

#: Exceptions with which DTensor reports unsupported cases. All others are findings.
_DECLINED = re.compile(
    r"no sharding strategy|does not have a sharding strategy|in-place operations|please redistribute|without redistribution"
    r"|cannot be evenly sharded|unsupported|not (yet |currently )?(supported|implemented)|(does not|doesn't) support",
    re.IGNORECASE,
)
#: Exceptions with which DTensor, or torch, reports unsupported cases if their text says so.
_CLEAR = (NotImplementedError, RuntimeError, ValueError)


class DTensorProgram(TorchPass):
    """Runs the graph on DTensors, and returns what its ranks run.

    Options are names of nodes, each with placements by dim of the mesh: "S0,R" shards dim 0 over the first, "S0,S0" over both,
    "F0,S0" over both in the order of FSDP on tensor parallel.

    Raises:
        Unsupported: the mesh is not a grid, or DTensor says that it does not support the program.
    """

    name = "torch:dtensor"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        with groups_of(gm):
            return self.rewrite(gm, gm.meta.get("options", {}))

    @classmethod
    def chosen(cls, told: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
        return {name: str(value) for name, value in {**told, **fixed}.items()}

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(entry="DTensor", placements=options)

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        mesh = device_mesh(gm.meta["groups"], gm.meta["world_size"], gm.meta["rank"])
        _require_own_memory(gm.graph)
        forget_shardings()
        placements = {name: str(value) for name, value in options.items()}

        def run(*given: torch.Tensor) -> Any:
            with self.running():
                return _Run(mesh, gm.meta["groups"], placements).run(gm.graph, given)

        traced = trace_ops(run, [node for node in gm.graph.nodes if node.op == "placeholder"])
        return lazy_module(gm, _written(gm.graph, traced))

    def running(self) -> contextlib.AbstractContextManager[None]:
        """What surrounds the ops of a program."""
        return contextlib.nullcontext()


def _require_own_memory(graph: fx.Graph) -> None:
    """Refuse programs in which it matters who shares memory: inputs are distributed as copies, results are gathered one by one.

    Raises:
        Unsupported: an input is written, or two results share memory.
    """
    inputs = {_memory(node): node.name for node in graph.nodes if node.op == "placeholder"}
    for node in graph.nodes:
        if node.op == "call_function" and not communicates(node):
            for name in (inputs[_memory(one)] for one in mutated_operands(node) if _memory(one) in inputs):
                raise Unsupported(f"node '{node.name}' writes into input '{name}', of which DTensor has a copy")
        if node.op == "output":
            returned = [_memory(one) for one in pytree.tree_leaves(node.args[0]) if isinstance(one, fx.Node)]
            if len(set(returned)) < len(returned):
                raise Unsupported("two results share memory, which DTensor does not promise")


def _memory(node: fx.Node) -> Any:
    """What tells which storage a value has; of a value that is no tensor, itself."""
    val = node.meta.get("val")
    return val.untyped_storage()._cdata if isinstance(val, torch.Tensor) else node


def device_mesh(groups: Mapping[str, tuple[int, ...]], world_size: int, rank: int) -> DeviceMesh:
    """The mesh of DTensor over the process groups of these names.

    Args:
        groups: of `rank`, in group order, by name of the mesh dim.

    Raises:
        Unsupported: they do not come from a row-major grid of all ranks.
    """
    sizes = [len(group) for group in groups.values()]
    grid = torch.arange(world_size)
    if torch.Size(sizes).numel() != world_size:
        raise Unsupported("the dims of the mesh are not a grid of all ranks")
    grid = grid.reshape(sizes)
    place = [int(i) for i in (grid == rank).nonzero()[0]]
    for number, group in enumerate(groups.values()):
        line = grid[tuple(slice(None) if n == number else i for n, i in enumerate(place))]
        if line.tolist() != list(group):
            raise Unsupported("the dims of the mesh are not a row-major grid of all ranks")
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    made = [resolve(name) for name in groups]
    found = DeviceMesh.from_group(made if len(made) > 1 else made[0], "cpu", mesh=grid, mesh_dim_names=tuple(groups))
    # DTensor keeps what it has found out for a mesh. What it finds may depend on the rank, of which a process has one.
    found._thread_id = rank
    return found


def read_placements(text: str, sizes: Sequence[int], shape: Sequence[int]) -> tuple[Placement, ...]:
    """Read placements by mesh dim, as options write them: "R", "S0" or "Psum", with commas. "F0" shards dim 0 as FSDP does: what
    the mesh dims behind this one have sharded before.

    Args:
        sizes: of the mesh dims.
        shape: of the tensor.

    Raises:
        Unsupported: it names others, or they do not fit.
    """
    letters = text.split(",")
    if len(letters) != len(sizes):
        raise Unsupported(f"'{text}' are placements over {len(letters)} mesh dims, of {len(sizes)}")
    return tuple(_placement(text, number, sizes, shape) for number in range(len(sizes)))


def _placement(text: str, number: int, sizes: Sequence[int], shape: Sequence[int]) -> Placement:
    letters = text.split(",")
    one = letters[number]
    if one == "R":
        return Replicate()
    if match := re.fullmatch(r"P(sum|avg|max|min|product)", one):
        return Partial(match[1])
    if not re.fullmatch(r"[SF]\d", one):
        hint = "write R, S0, S1, …, F0, F1, … or Psum, for each dim of the mesh"
        raise Unsupported(f"'{text}' are not placements", hint)
    dim = int(one[1:])
    if dim >= len(shape):
        raise Unsupported(f"a value of {len(shape)} dims cannot be placed as {text}")
    sharing = [n for n, other in enumerate(letters) if other in (f"S{dim}", f"F{dim}")]
    factor = math.prod(sizes[n] for n in sharing if n > number) if one[0] == "F" else 1
    if factor == 1:
        return Shard(dim)
    if dim and shape[dim] % math.prod(sizes[n] for n in sharing):
        raise Unsupported(f"FSDP shards dim 0 unevenly, and no other: dim {dim} has {shape[dim]} elements, as {text}")
    return _StridedShard(dim, split_factor=factor)


def distribute(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A tensor that all ranks have, in a layout, without communication. FSDP shards last."""
    last = [n for n, one in enumerate(placements) if isinstance(one, _StridedShard)]
    first = [Replicate() if n in last else one for n, one in enumerate(placements)]
    made = distribute_tensor(whole, mesh, first, src_data_rank=None)
    if not last:
        return made
    part: torch.Tensor = made.to_local()
    coordinate: Any = mesh.get_coordinate()
    for n in reversed(last):
        dim: int = placements[n].dim  # type: ignore[attr-defined]
        parts = part.chunk(mesh.size(n), dim)
        part = parts[coordinate[n]] if coordinate[n] < len(parts) else part.narrow(dim, 0, 0)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def trace_ops(run: Callable[..., Any], placeholders: Sequence[fx.Node], by: str = "DTensor") -> fx.GraphModule:
    """The ops that a function runs on values like these placeholders, without those that change no result.

    Args:
        run: it may use DTensors.
        by: of torch what it calls, for messages.

    Raises:
        Unsupported: torch says that it does not support this.
    """
    mode = new_fake_mode()
    with mode:
        values = [
            torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
            for val in (node.meta["val"] for node in placeholders)
        ]
    with declining(by), torch.no_grad(), shardings_untraced(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    live = _live(traced.graph)
    for node in reversed(list(traced.graph.nodes)):
        if node not in live:
            traced.graph.erase_node(node)
        elif node.op == "get_attr":
            _write_out(node, getattr(traced, str(node.target)), by)
    return traced


def _write_out(node: fx.Node, value: torch.Tensor, by: str) -> None:
    """Replace a constant of one element, a number that code has written, by an op that makes it.

    Raises:
        Unsupported: it has others.
    """
    if value.numel() != 1:
        raise Unsupported(f"{by} makes a constant of rank-dependent values ('{node.target}')")
    with node.graph.inserting_before(node):
        made = node.graph.call_function(
            torch.ops.aten.full.default, (list(value.shape), value.item()), {"dtype": value.dtype}
        )
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


@contextlib.contextmanager
def declining(by: str) -> Iterator[None]:
    """Decline what torch says that it does not support.

    Args:
        by: what of torch is called, for messages.

    Raises:
        Unsupported: it has said so.
    """
    try:
        yield
    except _CLEAR as error:
        text = str(error).strip()
        if isinstance(error, NotImplementedError) or _DECLINED.search(text):
            raise Unsupported(f"{by}: {type(error).__name__}: {' '.join(text.split())[:200]}") from error
        raise


@dataclass(frozen=True, slots=True)
class _Input:
    """An input that is not distributed yet.

    Attributes:
        node: its placeholder.
        local: what this rank has of it.
        over: how it is reduced, by the mesh dims over which it is.
    """

    node: fx.Node
    local: torch.Tensor
    over: Mapping[str, str] = field(default_factory=dict)


class _Run:
    """Runs the nodes of a graph on DTensors."""

    def __init__(self, mesh: DeviceMesh, groups: Mapping[str, tuple[int, ...]], options: Mapping[str, str]) -> None:
        self._mesh = mesh
        self._groups = groups
        self._options = options

    def run(self, graph: fx.Graph, given: Sequence[torch.Tensor]) -> Any:
        """Return what the graph returns, in full.

        Args:
            given: the values of its placeholders.
        """
        rest = iter(given)
        values: dict[fx.Node, Any] = {}
        pending: dict[fx.Node, _Input] = {}

        def known(node: fx.Node) -> Any:
            return values[node] if node in values else values.setdefault(node, self._given(pending[node]))

        for node in graph.nodes:
            if node.op == "placeholder":
                pending[node] = _Input(node, next(rest))
            elif node.op == "output":
                return map_aggregate(
                    node.args[0], lambda one: self._whole(known(one)) if isinstance(one, fx.Node) else one
                )
            elif (reduced := _reduces(node, pending)) is not None:
                source = pending[node.args[0]]
                pending[node] = replace(source, over={**source.over, **reduced})
            elif communicates(node):
                raise Unsupported(f"node '{node.name}' communicates, which programs of whole tensors leave to DTensor")
            else:
                args, kwargs = map_aggregate(
                    (node.args, node.kwargs), lambda one: known(one) if isinstance(one, fx.Node) else one
                )
                found = node.target(*args, **kwargs)
                if not any(isinstance(one, DTensor) for one in pytree.tree_leaves((args, kwargs))):
                    found = pytree.tree_map(self._distributed, found)
                values[node] = self._placed(found, node.name)
        raise Unsupported("the graph has no output")

    def _given(self, one: _Input) -> DTensor:
        """Distribute an input.

        Raises:
            Unsupported: ranks have different values of it that are not reduced, or it cannot be placed as its option says.
        """
        local, over, placed = one.local, one.over, self._options.get(one.node.name, "")
        reduced = {self._groups[name] for name in over}
        for group, placement in one.node.meta.get("placement", {}).items():
            if placement != REPLICATED and group not in reduced:
                raise Unsupported(
                    f"input '{one.node.name}' differs between ranks {list(group)}: it is no tensor of all ranks"
                )
        names = self._mesh.mesh_dim_names or ()
        letters = placed.split(",") if placed else ["R"] * len(names)
        if len(letters) == len(names):
            letters = ["R" if name in over else one for name, one in zip(names, letters, strict=True)]
        wanted = read_placements(",".join(letters), self._mesh.shape, local.shape)
        if any(one.is_partial() for one in wanted):
            raise Unsupported(f"an input of {local.dim()} dims cannot be distributed as {placed}")
        made = distribute(local, self._mesh, wanted)
        if not over:
            return made
        addends = [Partial(over[name]) if name in over else one for name, one in zip(names, wanted, strict=True)]
        return DTensor.from_local(
            made.to_local(), self._mesh, addends, run_check=False, shape=made.shape, stride=made.stride()
        )

    def _distributed(self, value: Any) -> Any:
        """A value that is made of none, as a DTensor; others as they are."""
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            return distribute_tensor(value, self._mesh, src_data_rank=None)
        return value

    def _placed(self, value: Any, name: str) -> Any:
        """A value where its option wants it."""
        if name not in self._options or not isinstance(value, DTensor):
            return value
        return value.redistribute(self._mesh, read_placements(self._options[name], self._mesh.shape, value.shape))

    @staticmethod
    def _whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value


def communicates(node: fx.Node) -> bool:
    """Whether ranks meet in a node, or wait for that."""
    op = lookup(node.target)
    return op.collective or op.phase is not None or op.effect


def _reduces(node: fx.Node, pending: Mapping[fx.Node, Any]) -> dict[str, str] | None:
    """Over which mesh dim, and how, a node reduces an input; {} for its wait, None for other nodes."""
    name = qualified_name(node.target)
    if not node.args or node.args[0] not in pending or name not in (_ALL_REDUCE, _WAIT):
        return None
    return {} if name == _WAIT else {str(node.args[2]): str(node.args[1])}


def _written(original: fx.Graph, traced: fx.GraphModule) -> fx.Graph:
    """The traced graph with the placeholders and the form of the result of the original."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in original.nodes if node.op == "placeholder"]
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            before = placeholders[len(made)]
            made[node] = graph.placeholder(str(before.target))
            made[node].meta.update(before.meta)
        elif node.op == "output":
            (returned,) = (one.args[0] for one in original.nodes if one.op == "output")
            graph.output(_result(returned, [made[one] for one in pytree.tree_leaves(node.args[0])]))
        else:
            made[node] = graph.node_copy(node, lambda one: made[one])
    return graph


def _result(form: Any, values: Sequence[fx.Node]) -> Any:
    """A result of this form, that holds these nodes."""
    rest = iter(values)
    return map_aggregate(form, lambda one: next(rest) if isinstance(one, fx.Node) else one)


def _live(graph: fx.Graph) -> set[fx.Node]:
    """What a traced graph does: what its results need, its collectives, and what writes into either.

    The rest is what DTensor tried out on the way, to see of what shape results are.
    """
    live: set[fx.Node] = {node for node in graph.nodes if node.op == "placeholder"}
    behind: dict[fx.Node, set[fx.Node]] = {}  # node → what it depends on, itself included
    writes = []
    todo = []
    for node in graph.nodes:
        behind[node] = {node}.union(*(behind[one] for one in node.all_input_nodes))
        name = qualified_name(node.target) if node.op == "call_function" else ""
        if node.op == "output" or name.startswith(("_c10d_functional::", "_dtensor::")):
            todo.append(node)
        elif (schema := getattr(node.target, "_schema", None)) is not None and schema.is_mutable:
            writes.append(node)
    while todo:
        live.update(*(behind[node] for node in todo))
        todo = [node for node in writes if node not in live and not live.isdisjoint(behind[node])]
    return live


__all__ = ["DTensorProgram", "declining", "device_mesh", "distribute", "read_placements", "trace_ops"]
