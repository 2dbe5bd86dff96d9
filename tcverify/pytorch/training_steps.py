"""What subjects that run training steps have in common: reading the step that a graph is, and handing on its inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.program import REPLICATED, Mesh, Program
from tcverify.program.graph import same_structure
from tcverify.pytorch.recording import CollectiveRecorder
from tcverify.strategies.training.data_parallel import TENSOR_PARALLEL


class Step(Protocol):
    """A training step that options of a program describe."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Any:
        """Read them. Raises `Unsupported` if they describe no such step."""

    def inputs(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the inputs by name, on one rank."""

    def __hash__(self) -> int:
        """Steps that are equal have the same."""


_Step = TypeVar("_Step", bound=Step)


def read_step(
    gm: fx.GraphModule,
    kind: type[_Step],
    write: Callable[[Mesh, _Step], Program],
    own: Collection[str] = (),
    alike: str = TENSOR_PARALLEL,
) -> _Step:
    """Read the training step that the options of a program describe.

    Args:
        kind: the class of such steps.
        write: makes the program of a step on a mesh.
        own: inputs of which each rank may have values of its own, except over one dim.
        alike: that dim.

    Raises:
        Unsupported: the graph, its inputs or its mesh are not those of such a step.
    """
    step: _Step = kind.of(gm.meta.get("options", {}))
    groups = gm.meta["groups"]
    if not groups:
        raise Unsupported("the mesh has no dims")
    mesh = Mesh.grid({name: len(members) for name, members in groups.items()})
    require_same(gm, _written(write, mesh, step), step.inputs(), "training step")
    over = {members for name, members in groups.items() if name != alike}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            for group, placement in node.meta["placement"].items():
                if placement != REPLICATED and (node.name not in own or group not in over):
                    raise Unsupported(f"ranks {list(group)} have different values of input '{node.name}'")
    return step


def require_same(gm: fx.GraphModule, written: fx.Graph, inputs: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Require that a graph is the one that its options describe.

    Args:
        written: that one.
        inputs: their shapes by name; all are float32.
        what: they describe.

    Raises:
        Unsupported: it is another graph, or has other inputs.
    """
    if not same_structure(written, gm.graph):
        raise Unsupported(f"the graph is not the {what} that its options describe")
    given = {node.name: node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"}
    if {name: tuple(val.shape) for name, val in given.items()} != inputs:
        raise Unsupported(f"the inputs have other shapes than those of the {what} that the options describe")
    if {val.dtype for val in given.values()} != {torch.float32}:
        raise Unsupported("inputs have other dtypes than float32")


@functools.lru_cache(maxsize=1)  # the ranks of a program ask for the same one, one after the other
def _written(write: Callable[[Mesh, Any], Program], mesh: Mesh, step: Any) -> fx.Graph:
    return write(mesh, step).graphs[0]


def record(
    gm: fx.GraphModule, shapes: Mapping[str, tuple[int, ...]], run: Callable[[dict[str, torch.Tensor]], Any]
) -> fx.GraphModule:
    """What a rank does in a training step, in place of a graph.

    Args:
        shapes: of the inputs by name.
        run: the step, on tensors that are zero, by name; gives what the graph returns.
    """
    values = {name: torch.zeros(shape) for name, shape in shapes.items()}
    recorder = CollectiveRecorder()
    for name, value in values.items():
        recorder.input(name, value)
    with recorder:
        found = run(values)
    made = recorder.finish(found)
    with_inputs_of(gm, made.graph)
    return made


def with_inputs_of(gm: fx.GraphModule, made: fx.Graph) -> None:
    """Give the inputs of a graph the metadata that they have in the module from which it was made."""
    metadata = {node.target: node.meta for node in gm.graph.nodes if node.op == "placeholder"}
    for node in made.nodes:
        if node.op == "placeholder":
            node.meta.update(metadata[node.target])


__all__ = ["read_step", "record", "require_same", "with_inputs_of"]
