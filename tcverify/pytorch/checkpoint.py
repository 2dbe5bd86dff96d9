"""Distributed checkpoints as a pass: the inputs of a program are saved in one layout and loaded in another.

Inputs that are the same on all ranks make up a state dict: DTensors, and plain tensors where no placements are given. The
planners of torch.distributed.checkpoint decide which rank writes what, and what is read where. Storage is what the ranks
broadcast: every chunk, from the rank that writes it. Where a plan leaves an element out, memory that nothing has written shows.
What is loaded is put together by DTensor, and takes the place of the input.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.distributed import device_mesh as meshes
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from tcverify.errors import Unsupported
from tcverify.ops import resolve
from tcverify.program import REPLICATED
from tcverify.program.graph import lazy_module
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.compat import filter_known_options, forget_shardings, patch_attributes
from tcverify.pytorch.dtensor import device_mesh, distribute, read_placements, trace_ops

Tensor = torch.Tensor

#: What planners of a process remember between checkpoints, if they cache plans.
_CACHES = ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Placements over a grid of ranks, as options write them; without a grid a plain tensor, which every rank has."""

    grid: Tensor | None = None
    letters: tuple[str, ...] = ()


class Checkpoint(TorchPass):
    """Saves inputs, and loads them in the layouts that the options name: by placeholder, as for `torch:dtensor`.

    Raises:
        Unsupported: the mesh is not a grid, or a layout does not fit.
    """

    name = "torch:checkpoint"

    @classmethod
    def chosen(cls, told: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
        return {**told, **super().chosen(told, fixed)}

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule | None:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        kept = [node for node in placeholders if all(one == REPLICATED for one in node.meta["placement"].values())]
        if not kept:
            return None
        ranks = _Ranks(gm.meta, options)
        loaded = {node.name: _asked(ranks.grid, node, str(options.get(node.name, ""))) for node in kept}
        saved = {node.name: _saved(options["saved"], loaded[node.name], node, ranks.grid) for node in kept}
        forget_shardings()

        def run(*given: Tensor) -> list[Tensor]:
            wholes = {node.name: value for node, value in zip(kept, given, strict=True)}
            if options["enable_plan_caching"]:  # an earlier checkpoint, in other layouts
                with disable_proxy_modes_tracing():
                    ranks.save(wholes, loaded)
            metadata, storage = ranks.save(wholes, saved)
            return list(ranks.load(wholes, loaded, metadata, storage).values())

        with _no_plans_cached():
            traced = trace_ops(run, kept, by="torch.distributed.checkpoint")
        return lazy_module(gm, _followed(gm.graph, kept, traced.graph))


class _Ranks:
    """All ranks of a program, of which one is traced."""

    def __init__(self, facts: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._groups, self._rank = facts["groups"], facts["rank"]
        self._mesh = device_mesh(facts["groups"], facts["world_size"], facts["rank"])
        self.grid = self._mesh.mesh
        self._places = torch.cartesian_prod(*map(torch.arange, self.grid.shape)).reshape(-1, self.grid.ndim).tolist()
        self._options = options
        self._planners = [self._save_planner(rank) for rank in range(facts["world_size"])]

    def save(self, wholes: Mapping[str, Tensor], layouts: Mapping[str, _Layout]) -> tuple[Any, dict[Any, Tensor]]:
        """Save a checkpoint. Return its metadata, and the chunks that ranks have written."""
        own = self._nested(_held(wholes, layouts, self._rank))
        with disable_proxy_modes_tracing():
            for rank, planner in enumerate(self._planners):
                state = own if rank == self._rank else self._nested(_held(wholes, layouts, rank))
                planner.set_up_planner(state, is_coordinator=rank == 0)
            plans, metadata = self._planners[0].create_global_plan([one.create_local_plan() for one in self._planners])
            plans = [one.finish_plan(plan) for one, plan in zip(self._planners, plans, strict=True)]
        storage = {}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                with contextlib.nullcontext() if rank == self._rank else disable_proxy_modes_tracing():
                    chunk = self._planners[rank].resolve_data(item).detach().contiguous()
                if rank != self._rank:
                    chunk = torch.zeros(chunk.shape, dtype=chunk.dtype)
                storage[item.index] = self._broadcast(chunk, rank)
        return copy.deepcopy(metadata), storage  # by the same methods as files are written

    def load(
        self, wholes: Mapping[str, Tensor], layouts: Mapping[str, _Layout], metadata: Any, storage: Mapping[Any, Tensor]
    ) -> dict[str, Tensor]:
        """Load a checkpoint on the rank that is traced. Return the tensors in full."""
        own = self._unwritten(wholes, layouts, self._rank)
        planners = [self._load_planner() for _ in self._planners]
        with disable_proxy_modes_tracing():
            for rank, planner in enumerate(planners):
                state = own if rank == self._rank else self._unwritten(wholes, layouts, rank)
                planner.set_up_planner(self._nested(state), metadata, is_coordinator=rank == 0)
            plans = planners[0].create_global_plan([one.create_local_plan() for one in planners])
            planner = planners[self._rank]
            plan = planner.finish_plan(plans[self._rank])
        for item in plan.items:
            source = narrow_tensor_by_index(storage[item.storage_index], item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.size() != source.size():  # as readers of files check
                raise ValueError(f"{item.dest_index.fqn}: {list(source.size())} are read into {list(target.size())}")
            target.copy_(source)
            planner.commit_tensor(item, target)
        return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in own.items()}

    def _save_planner(self, rank: int) -> Any:
        names = ("flatten_state_dict", "flatten_sharded_tensors", "dedup_save_to_lowest_rank", "enable_plan_caching")
        told = {name: self._options[name] for name in names}
        made: Any = DefaultSavePlanner(**filter_known_options(DefaultSavePlanner, told))
        made._cached_plans_key = f"rank {rank}"  # the caches are those of a process, which has one rank elsewhere
        return made

    def _load_planner(self) -> Any:
        return DefaultLoadPlanner(
            flatten_state_dict=self._options["flatten_state_dict"],
            flatten_sharded_tensors=self._options["flatten_sharded_tensors"],
        )

    def _nested(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """A state dict as of a model, which planners may flatten."""
        return {"model": state} if self._options["flatten_state_dict"] else state

    def _unwritten(self, wholes: Mapping[str, Tensor], layouts: Mapping[str, _Layout], rank: int) -> dict[str, Tensor]:
        """What a rank loads into."""
        found: dict[str, Tensor] = {}
        for name, held in _held(wholes, layouts, rank).items():
            if isinstance(held, DTensor):
                local = torch.empty(held.to_local().shape, dtype=held.dtype)
                mesh = self._mesh if rank == self._rank else held.device_mesh
                found[name] = DTensor.from_local(
                    local, mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
                )
            else:
                found[name] = torch.empty(held.shape, dtype=held.dtype)
        return found

    def _broadcast(self, chunk: Tensor, writer: int) -> Tensor:
        """A chunk of a rank, on all ranks: over the dims of the mesh one by one."""
        if not chunk.numel():
            return chunk
        for group, position in zip(self._groups, self._places[writer], strict=True):
            started = resolve("_c10d_functional::broadcast")(chunk, position, group)
            chunk = resolve("_c10d_functional::wait_tensor")(started)
        return chunk


def _held(wholes: Mapping[str, Tensor], layouts: Mapping[str, _Layout], rank: int) -> dict[str, Tensor]:
    """What a rank holds of tensors."""
    found = dict(wholes)
    for name, layout in layouts.items():
        if layout.grid is not None:
            whole, mesh = wholes[name], _mesh_of(layout.grid, rank)
            found[name] = distribute(whole, mesh, read_placements(",".join(layout.letters), mesh.shape, whole.shape))
    return found


def _mesh_of(grid: Tensor, rank: int) -> meshes.DeviceMesh:
    """The mesh of a rank, without process groups."""
    with mock.patch.object(meshes, "get_rank", return_value=rank), disable_proxy_modes_tracing():
        found = meshes.DeviceMesh("cpu", grid, _init_backend=False)
        found.get_coordinate()
    found._thread_id = rank  # what DTensor remembers of a mesh may depend on the rank, of which a process has one
    return found


@contextlib.contextmanager
def _no_plans_cached() -> Iterator[None]:
    """Let planners begin without what they remember."""
    with patch_attributes(SavePlanner, **{f"_cached_{name}": {} for name in _CACHES}):
        yield


def _asked(grid: Tensor, node: fx.Node, text: str) -> _Layout:
    """The layout that a text asks for; that of a plain tensor if it is empty."""
    if not text:
        return _Layout()
    shape = node.meta["val"].shape
    if any(one.is_partial() for one in read_placements(text, grid.shape, shape)):
        raise Unsupported(f"an input of {len(shape)} dims cannot be saved as {text}")
    return _Layout(grid, tuple(text.split(",")))


def _saved(how: str, loaded: _Layout, node: fx.Node, grid: Tensor) -> _Layout:
    """The layout in which a tensor is saved that is loaded in this one."""
    dims = node.meta["val"].dim()
    if how == "plain" or (how == "same" and loaded.grid is None):
        return _Layout()
    replicated = ("R",) * grid.ndim
    letters = loaded.letters or replicated
    sharded = next((int(one[1:]) for one in letters if one != "R"), 0)
    shards = (f"S{sharded}", f"S{(sharded + 1) % dims}") if dims else ("R", "R")
    line = grid.flatten()
    if how in ("line", "backwards"):
        return _Layout(line if how == "line" else line.flip(0), shards[:1])
    if how == "square":
        return _Layout(line.reshape(2 if len(line) % 2 == 0 else 1, -1), shards)
    if how == "transposed":
        return _Layout(grid.permute(*reversed(range(grid.ndim))).contiguous(), letters)
    others = {
        "same": letters,
        "turned": letters[::-1],
        "replicated": replicated,
        "next": tuple(one if one == "R" else f"{one[0]}{(int(one[1:]) + 1) % dims}" for one in letters),
    }
    return _Layout(grid, others[how])


def _followed(original: fx.Graph, kept: Sequence[fx.Node], traced: fx.Graph) -> fx.Graph:
    """The original graph, behind a traced one whose results replace these placeholders."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    rest = iter(kept)
    for node in original.nodes:
        if node.op == "placeholder":
            made[node] = graph.node_copy(node)
    for node in traced.nodes:
        if node.op == "placeholder":
            made[node] = made[next(rest)]
        elif node.op == "output":
            made.update(zip(kept, [made[one] for one in node.args[0]], strict=True))
        else:
            made[node] = graph.node_copy(node, lambda one: made[one])
    for node in original.nodes:
        if node.op != "placeholder":
            made[node] = graph.node_copy(node, lambda one: made[one])
    return graph


__all__ = ["Checkpoint"]
