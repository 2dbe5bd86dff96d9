"""Forward passes with collectives as data, and what their gradients are: those of the sum of the losses of all ranks.

Subjects run the same forward passes with the collectives of PyTorch, and let autograd find the gradients.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tcverify.errors import Unsupported
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, RankBinding
from tcverify.program.graph import same_structure
from tcverify.strategies.choices import weighted_table
from tcverify.strategies.meshes import WORLD_SIZES, all_meshes, drawn_on
from tcverify.strategies.tracing import write_traced

Tensor = torch.Tensor
Shape = tuple[int, ...]
_Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Subgroup:
    """The group of a rank over a mesh dim.

    Attributes:
        name: of the mesh dim.
        rank: in the group.
        size: of the group.
    """

    name: str
    rank: int
    size: int


class Collectives(Protocol):
    """Collectives that a forward pass can be run with. All wait for what they return, and are differentiable.

    Where they take several values, each is a collective of its own, which may be sent together with the others.
    """

    def all_reduce(self, values: Sequence[Tensor], group: Subgroup, op: str) -> Sequence[Tensor]:
        """Reduce by "sum", "avg", "max" or "min"."""

    def all_gather(self, values: Sequence[Tensor], group: Subgroup, dim: int) -> Sequence[Tensor]:
        """Join along a dim."""

    def reduce_scatter(self, values: Sequence[Tensor], group: Subgroup, op: str, dim: int) -> Sequence[Tensor]:
        """Reduce by "sum" or "avg", and keep an equal part along a dim."""

    def all_to_all(self, value: Tensor, group: Subgroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange so many rows with each rank of the group."""

    def broadcast(self, value: Tensor, group: Subgroup, source: int) -> Tensor:
        """Take what the rank has that stands at this place of the group."""


#: Ops of a rank, by name: how many operands they take, and what they compute.
_LOCAL: Mapping[str, tuple[int, Callable[..., Tensor]]] = {
    "add": (2, torch.add),
    "mul": (2, torch.mul),
    "matmul": (2, torch.mm),
    "square": (1, lambda x: x * x),
    "relu": (1, torch.relu),
    "tanh": (1, torch.tanh),
    "transpose": (1, lambda x: x.t()),
    "first": (1, lambda x: x[: (x.shape[0] + 1) // 2]),
    "total": (1, lambda x: x.sum(0, keepdim=True)),
    "detach": (1, lambda x: x.detach()),
}

#: Difference up to which an operand of "max" or "min" is the result: they are equal, but for rounding.
_SAME = 1e-6

#: Most elements of a value.
MOST_ELEMENTS = 256


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward pass of matrices, and a loss: half of the squares of all that is not read, summed.

    Attributes:
        shapes: of the inputs, the same on all ranks.
        wanted: inputs whose gradients are wanted.
        calls: names of ops, their arguments, and numbers of operands, in words: "all_gather tp 1 0" gathers input 0 over mesh
            dim tp along dim 1. Inputs are numbered first, then results.
    """

    shapes: tuple[Shape, ...]
    wanted: tuple[int, ...]
    calls: tuple[str, ...]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Forward:
        """Read the options of a program.

        Raises:
            Unsupported: they describe no forward pass.
        """
        try:
            shapes, wanted, calls = (tuple(options[one.name]) for one in fields(cls))
            found = cls(tuple(tuple(map(operator.index, shape)) for shape in shapes), wanted, calls)
            words = bool(calls) and all(isinstance(call, str) and call.split() for call in calls)
            sizes = all(len(shape) == 2 and 0 <= math.prod(shape) <= MOST_ELEMENTS for shape in found.shapes)
            sound = words and sizes and bool(wanted) and set(wanted) <= set(range(len(shapes)))
        except (KeyError, TypeError):
            sound = False
        if not sound:
            raise Unsupported("the options of the program describe no forward pass with collectives")
        return found

    def options(self) -> dict[str, Any]:
        """As options of a program."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def names(self) -> list[str]:
        """Of the inputs."""
        return [f"x{number}" for number in range(len(self.shapes))]

    def outputs(
        self, given: Sequence[Tensor], groups: Mapping[str, Subgroup], collectives: Collectives
    ) -> list[Tensor]:
        """Run it; what no call reads.

        Raises:
            RuntimeError: the operands of a call have other shapes than it takes.
            Unsupported: a call is none.
        """
        values = list(given)
        read: set[int] = set()
        for call in self.calls:
            try:
                made, operands = _called(call, values, groups, collectives)
            except (IndexError, KeyError, ValueError) as error:
                raise Unsupported(f"'{call}' is no call of a forward pass with collectives") from error
            values += made
            read.update(operands)
        return [value for number, value in enumerate(values) if number not in read and number >= len(given)]

    def run(self, given: Sequence[Tensor], groups: Mapping[str, Subgroup], collectives: Collectives) -> dict[str, Any]:
        """Run forward and backward; the outputs, and the gradients of the wanted inputs by name."""
        own = [value.detach().requires_grad_(number in self.wanted) for number, value in enumerate(given)]
        outputs = self.outputs(own, groups, collectives)
        return {"outputs": [one.detach() for one in outputs], "grads": self.gradients(outputs, own)}

    def gradients(self, outputs: Sequence[Tensor], own: Sequence[Tensor]) -> dict[str, Tensor]:
        """Run the backward; zeros where the loss does not depend on an input."""
        loss, wanted = loss_of(outputs), [own[number] for number in self.wanted]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(wanted)
        found = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(wanted, grads, strict=True)]
        return {f"x{number}": grad for number, grad in zip(self.wanted, found, strict=True)}


def loss_of(outputs: Sequence[Tensor]) -> Tensor:
    """The loss of a rank: half of the squares of its outputs, summed."""
    return functools.reduce(torch.add, [(one * one).sum() for one in outputs]) * 0.5


def _called(
    call: str, values: Sequence[Tensor], groups: Mapping[str, Subgroup], collectives: Collectives
) -> tuple[list[Tensor], list[int]]:
    """What a call makes, and the numbers of what it reads.

    Raises:
        IndexError, KeyError, RuntimeError or ValueError: it is none, or its operands do not fit.
    """
    op, *rest = call.split()
    choices = _WORDS.get(op, ())
    group = groups[rest.pop(0)] if op in _WORDS else None
    words, operands = rest[: len(choices)], [int(word) for word in rest[len(choices) :]]
    fits = all(word in known for word, known in zip(words, choices, strict=True)) and min(operands) >= 0
    if not fits or (group is None and len(operands) != _LOCAL[op][0]):
        raise ValueError(call)
    several = [values[number] for number in operands]
    if group is None:
        return [_LOCAL[op][1](*several)], operands
    if op == "all_reduce":
        return [*collectives.all_reduce(several, group, words[0])], operands
    if op == "all_gather":
        return [*collectives.all_gather(several, group, int(words[0]))], operands
    if op == "reduce_scatter":
        return [*collectives.reduce_scatter(several, group, words[0], int(words[1]))], operands
    (value,) = several
    if op == "broadcast":
        return [collectives.broadcast(value, group, 0 if words[0] == "first" else group.size - 1)], operands
    sent = _divided(words[0], value.shape[0], group.size)
    return [collectives.all_to_all(value, group, sent, [sent[group.rank]] * group.size)], operands


#: Collectives by name: what the words between the mesh dim and the operands can be.
_WORDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "all_reduce": (weighted_table(("sum", 6), ("avg", 2), ("max", 1), ("min", 1)),),
    "all_gather": (("0", "1"),),
    "reduce_scatter": (weighted_table(("sum", 9), ("avg", 1)), ("0", "1")),
    "all_to_all": (("equal", "rising", "last"),),
    "broadcast": (("first", "last"),),
}

#: Collectives that do something else on each rank.
_BY_RANK = ("all_to_all", "broadcast")


def _divided(how: str, rows: int, size: int) -> list[int]:
    """How many of these rows go to each rank of a group. All ranks send the same numbers."""
    if how == "last":
        return [0] * (size - 1) + [rows]
    if how == "rising":
        low = [rows // size - (1 if rows >= size and place == 0 else 0) for place in range(size)]
        return [*low[:-1], rows - sum(low[:-1])]
    if how != "equal" or rows % size:
        raise ValueError(how)
    return [rows // size] * size


# ----------------------------------------------------------------------------------------------------------- gradients


class _Linear(torch.autograd.Function):
    """A linear function, and the one that gradients take back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, function: _Function, transposed: _Function) -> Tensor:
        ctx.transposed = transposed
        return function(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.transposed(grad), None, None


def _linear(value: Tensor, function: _Function, transposed: _Function) -> Tensor:
    made: Tensor = _Linear.apply(value, function, transposed)  # type: ignore[no-untyped-call]
    return made


def _sent(op: str, *arguments: Any) -> _Function:
    """A functional collective, and its wait."""
    ops: Any = torch.ops._c10d_functional

    def communicated(value: Tensor) -> Tensor:
        made: Tensor = ops.wait_tensor(getattr(ops, op)(value.contiguous(), *arguments))
        return made

    return communicated


class _Transposed(Collectives):
    """Functional collectives, whose gradients follow from what they compute for all ranks together."""

    def all_reduce(self, values: Sequence[Tensor], group: Subgroup, op: str) -> list[Tensor]:
        return [self._reduced(value, group, op) for value in values]

    def _reduced(self, value: Tensor, group: Subgroup, op: str) -> Tensor:
        if op in ("max", "min"):  # the mean of the operands that are the result
            made = _sent("all_reduce", op, group.name)(value.detach())
            chosen = ((made - value.detach()).abs() <= _SAME).to(value.dtype)
            value = value * (chosen / _sent("all_reduce", "sum", group.name)(chosen))
            op = "sum"
        function = _sent("all_reduce", op, group.name)
        return _linear(value, function, function)

    def all_gather(self, values: Sequence[Tensor], group: Subgroup, dim: int) -> list[Tensor]:
        function = _sent("all_gather_into_tensor", group.size, group.name)
        transposed = _sent("reduce_scatter_tensor", "sum", group.size, group.name)
        return [_linear(value.transpose(0, dim), function, transposed).transpose(0, dim) for value in values]

    def reduce_scatter(self, values: Sequence[Tensor], group: Subgroup, op: str, dim: int) -> list[Tensor]:
        function = _sent("reduce_scatter_tensor", "sum", group.size, group.name)
        transposed = _sent("all_gather_into_tensor", group.size, group.name)
        share = group.size if op == "avg" else 1
        return [_linear(value.transpose(0, dim), function, transposed).transpose(0, dim) / share for value in values]

    def all_to_all(self, value: Tensor, group: Subgroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        there, back = [*received], [*sent]
        function = _sent("all_to_all_single", there, back, group.name)
        return _linear(value, function, _sent("all_to_all_single", back, there, group.name))

    def broadcast(self, value: Tensor, group: Subgroup, source: int) -> Tensor:
        function, summed = _sent("broadcast", source, group.name), _sent("all_reduce", "sum", group.name)
        share = 1.0 if group.rank == source else 0.0  # nobody has what the other ranks gave
        return _linear(value, function, lambda grad: summed(grad) * share)


# ------------------------------------------------------------------------------------------------------------ programs


def subgroups_of(groups: Mapping[str, Sequence[int]], rank: int) -> dict[str, Subgroup]:
    """The groups of a rank by mesh dim."""
    return {name: Subgroup(name, list(members).index(rank), len(members)) for name, members in groups.items()}


def gradients_program(mesh: Mesh, forward: Forward, seed: int = 0) -> Program:
    """The forward pass on every rank of a mesh, and its gradients: those of the sum of the losses of all ranks."""
    placed = tuple((dim.name, VARYING) for dim in mesh.dims)
    inputs = tuple(InputSpec(*one, placements=placed) for one in zip(forward.names(), forward.shapes, strict=True))
    graphs: list[fx.Graph] = []
    ranks = []
    for rank in range(mesh.world_size):
        groups = {dim.name: dim.group(rank) for dim in mesh.dims}
        builder = GraphBuilder(mesh, {spec.name: spec for spec in inputs}, rank)
        made = builder.finish(write_gradients(builder, forward, groups, rank))
        same = [number for number, graph in enumerate(graphs) if same_structure(graph, made)]
        if not same:
            graphs.append(made)
        ranks.append(RankBinding(same[0] if same else len(graphs) - 1, {}))
    return Program(mesh, tuple(graphs), tuple(ranks), inputs, seed, ("gradients",))


def write_gradients(
    b: GraphBuilder, forward: Forward, groups: Mapping[str, Sequence[int]], rank: int
) -> dict[str, Any]:
    """Write what `Forward.run` gives on a rank."""
    subgroups = list(subgroups_of(groups, rank).values())
    if not any(call.startswith(_BY_RANK) for call in forward.calls):
        subgroups = [replace(group, rank=0) for group in subgroups]
    made = write_traced(b, _traced(forward, tuple(subgroups)), [b.input(name) for name in forward.names()])
    several = len(made) - len(forward.wanted)
    grads = zip(forward.wanted, made[several:], strict=True)
    return {"outputs": tuple(made[:several]), "grads": {f"x{number}": grad for number, grad in grads}}


@functools.lru_cache(maxsize=16)  # ranks of a program ask for the same one, one after the other
def _traced(forward: Forward, groups: tuple[Subgroup, ...]) -> fx.Graph:
    """A graph that takes the inputs, and returns outputs and gradients in one list."""

    def run(*given: Tensor) -> list[Tensor]:
        found = forward.run(given, {group.name: group for group in groups}, _Transposed())
        return [*found["outputs"], *found["grads"].values()]

    return make_fx(run, tracing_mode="fake")(*(torch.zeros(shape) for shape in forward.shapes)).graph


# ------------------------------------------------------------------------------------------------------------- drawing

_KINDS = weighted_table(
    ("all_reduce", 4), ("all_gather", 4), ("reduce_scatter", 3), ("all_to_all", 3), ("broadcast", 1), ("none", 2),
    ("add", 2), ("mul", 2), ("matmul", 2), ("square", 1), ("relu", 1), ("tanh", 1), ("transpose", 2), ("first", 1), ("total", 1),
    ("detach", 1),
)  # fmt: skip
_SHAPES = ((4, 4), (2, 4), (4, 2), (6, 4), (3, 2), (1, 6), (12, 2))
CALLS = 8
CALL_WIDTH = 5
#: Bytes of a whole program: its seed, inputs and which are wanted; then each call: its kind, operands, mesh dim, and how.
WIDTH = 3 + CALLS * CALL_WIDTH


def decode_gradients(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a forward pass and its gradients."""
    forward = decode_forward(mesh, choices)
    return replace(gradients_program(mesh, forward, choices[0] if choices else 0), options=forward.options())


def decode_forward(mesh: Mesh, choices: bytes) -> Forward:
    """Decode any bytes into a forward pass for a mesh. Calls that do not fit are left out."""
    choices = choices.ljust(WIDTH, b"\0")
    several, which = choices[1:3]
    shapes = tuple(_SHAPES[(which + number * (several // 4)) % len(_SHAPES)] for number in range(1 + several % 3))
    wanted = tuple(number for number in range(len(shapes)) if not which >> 5 + number & 1) or (0,)
    draft = _Draft(mesh, [[shape] * mesh.world_size for shape in shapes])
    for at in range(3, WIDTH, CALL_WIDTH):
        draft.add(*choices[at : at + CALL_WIDTH])
    if not draft.calls:
        draft.add(0, 0, 0, 0, 0)
    return Forward(shapes, wanted, tuple(draft.calls))


@dataclass(slots=True)
class _Draft:
    """A forward pass under construction.

    Attributes:
        shapes: of each value, on each rank.
        calls: see `Forward.calls`.
    """

    mesh: Mesh
    shapes: list[list[Shape]]
    calls: list[str]

    def __init__(self, mesh: Mesh, shapes: list[list[Shape]]) -> None:
        self.mesh, self.shapes, self.calls = mesh, shapes, []

    def add(self, kind: int, one: int, other: int, dim: int, how: int) -> None:
        """Add a call, unless it does not fit."""
        op = _KINDS[kind % len(_KINDS)]
        if op == "none":
            return
        newest = len(self.shapes) - 1
        operands = [newest - (one * one * len(self.shapes) >> 16)]
        words = [op]
        if op not in _LOCAL:
            words.append(self.mesh.dims[dim % len(self.mesh.dims)].name)
            words += [known[(how >> 3 * place) % len(known)] for place, known in enumerate(_WORDS[op])]
        if _LOCAL.get(op, (1,))[0] == 2 or (op in ("all_reduce", "all_gather", "reduce_scatter") and dim // 8 % 4 == 3):
            operands.append(other % len(self.shapes))
        call = " ".join([*words, *map(str, operands)])
        try:
            made = self._made(call)
        except (ValueError, RuntimeError):
            return
        if all(math.prod(shape) <= MOST_ELEMENTS for value in made for shape in value):
            self.calls.append(call)
            self.shapes += made

    def _made(self, call: str) -> list[list[Shape]]:
        """The shapes of what a call makes."""
        made = []
        for rank in range(self.mesh.world_size):
            groups = {dim.name: dim.group(rank) for dim in self.mesh.dims}
            values = [torch.empty(shapes[rank], device="meta") for shapes in self.shapes]
            found, operands = _called(call, values, subgroups_of(groups, rank), _Shapes())
            if call.split()[0] in _WORDS:
                members = groups[call.split()[1]]
                if any(len({self.shapes[number][one] for one in members}) > 1 for number in operands):
                    raise ValueError(call)
            made.append([tuple(one.shape) for one in found])
        return [list(each) for each in zip(*made, strict=True)]


class _Shapes(Collectives):
    """Gives values of the shapes that collectives return."""

    def all_reduce(self, values: Sequence[Tensor], group: Subgroup, op: str) -> Sequence[Tensor]:
        return values

    def all_gather(self, values: Sequence[Tensor], group: Subgroup, dim: int) -> Sequence[Tensor]:
        return [torch.cat([value] * group.size, dim) for value in values]

    def reduce_scatter(self, values: Sequence[Tensor], group: Subgroup, op: str, dim: int) -> Sequence[Tensor]:
        if any(value.shape[dim] % group.size for value in values):
            raise ValueError(dim)
        return [value.narrow(dim, 0, value.shape[dim] // group.size) for value in values]

    def all_to_all(self, value: Tensor, group: Subgroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return value.new_empty(sum(received), *value.shape[1:])

    def broadcast(self, value: Tensor, group: Subgroup, source: int) -> Tensor:
        return value


def gradients_programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Draw forward passes with collectives, and their gradients.

    Args:
        mesh: what they run on; None draws one.
        world_size: of the drawn mesh; None draws 2, 3 or 4.
    """
    sizes = WORLD_SIZES if world_size is None else (world_size,)
    listed = [mesh] if mesh is not None else [one for size in sizes for one in all_meshes(size)]
    return drawn_on(listed, decode_gradients, WIDTH)


__all__ = [
    "MOST_ELEMENTS",
    "WIDTH",
    "Collectives",
    "Forward",
    "Subgroup",
    "decode_forward",
    "decode_gradients",
    "gradients_program",
    "gradients_programs",
    "loss_of",
    "subgroups_of",
    "write_gradients",
]  # fmt: skip
