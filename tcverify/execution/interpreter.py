"""The one interpreter: a rank is a generator that walks its FX graph and yields a `Request` at every collective.

Lockstep drives all generators of a program in one process; a rank process drives one and answers with a real process group.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from tcverify.arithmetic import FLOAT64, Float64
from tcverify.errors import UnsupportedOp
from tcverify.ops import Collective, Op, Request, by_meaning, lookup, qualified_name
from tcverify.program import InputSpec, Mesh, Program
from tcverify.program.graph import RankConstant, constant_value


@dataclass(frozen=True, slots=True)
class NodeError:
    """A node raised on a rank."""

    node: str
    message: str

    def __str__(self) -> str:
        return f"node '{self.node}' raises {self.message}"


@dataclass(frozen=True, slots=True)
class Call:
    """One collective that a rank entered."""

    node: str
    collective: Collective


@dataclass(slots=True)
class RankResult:
    """What one rank did.

    Attributes:
        outputs: leaves of the output, in order. Empty when the rank did not finish or ran elsewhere.
        structure: how the outputs nest, as text.
        inputs: the input tensors after the run.
        input_names: the names of `inputs`.
        mutates: whether the graph writes into anything.
        calls: the collectives it entered, in order.
        values: every node's value, when observed.
        error: set when a node raised.
        digest: projections of the outputs, when the rank ran elsewhere; see `compare.digest`.
    """

    rank: int
    outputs: list[Any] = field(default_factory=list)
    structure: str = ""
    inputs: list[torch.Tensor] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    mutates: bool = False
    calls: list[Call] = field(default_factory=list)
    values: dict[str, Any] | None = None
    error: NodeError | None = None
    digest: list[list[float]] = field(default_factory=list)


@dataclass(slots=True)
class _Slot:
    """Stands in an argument template for the value of an earlier node."""

    index: int


@dataclass(slots=True)
class _Step:
    name: str
    run: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    slots: list[tuple[int, int]]  # (position in args, value slot), for arguments that are plain values
    nested: bool  # whether args or kwargs hold slots or rank constants elsewhere
    collective: bool
    carry: bool  # whether the result may have another floating dtype than the domain's
    perturbable: bool
    dead: list[int]  # value slots that nobody reads after this step


@dataclass(slots=True)
class Plan:
    """A graph, prepared for running in a number domain."""

    placeholders: list[str]
    steps: list[_Step]
    result: Any
    mutates: bool
    unsupported: list[str]  # sentences naming each op without a meaning


_PLANS: weakref.WeakKeyDictionary[fx.Graph, Plan] = weakref.WeakKeyDictionary()


def plan_of(graph: fx.Graph, module: torch.nn.Module | None = None, domain: Float64 = FLOAT64) -> Plan:
    """Return the plan of a graph, made once per graph.

    Args:
        module: owns the attributes and submodules that the graph refers to.
    """
    plan = _PLANS.get(graph)
    if plan is None:
        plan = _PLANS[graph] = _make_plan(graph, module, domain)
    return plan


def _make_plan(graph: fx.Graph, module: torch.nn.Module | None, domain: Float64) -> Plan:
    numbers: dict[fx.Node, int] = {}
    last_use: dict[int, int] = {}
    plan = Plan([], [], None, False, [])

    def template(value: Any) -> Any:
        return _Slot(numbers[value]) if isinstance(value, fx.Node) else domain.literal(value)

    for node in graph.nodes:
        if node.op == "placeholder":
            numbers[node] = len(numbers)
            plan.placeholders.append(node.name)
            continue
        if node.op == "output":
            plan.result = map_aggregate(node.args[0], template)
            for operand in node.all_input_nodes:
                last_use.pop(numbers[operand], None)
            break
        op = _op_of(node, module)
        if op.run is None:
            plan.unsupported.append(f"{op.name} ({node.name}): {op.reason}")
        if _may_write(node):
            plan.mutates = True
        args: list[Any] = []
        slots: list[tuple[int, int]] = []
        kwargs = dict(map_aggregate(node.kwargs, template)) if node.kwargs else {}
        plain = not (kwargs and _count(kwargs))
        for position, argument in enumerate(node.args):
            if isinstance(argument, fx.Node):
                slots.append((position, numbers[argument]))
                args.append(_Slot(numbers[argument]))
            elif isinstance(argument, (int, float, str, type(None))):
                args.append(argument)
            else:
                args.append(map_aggregate(argument, template))
                plain = plain and not _count(args[-1])
        step = _Step(
            name=node.name,
            run=op.run or _refuse,
            args=args,
            kwargs=kwargs,
            slots=slots,
            nested=not plain,
            collective=op.collective,
            carry=not op.aliases or not node.all_input_nodes or op.name.startswith(_FOREIGN),
            perturbable=not op.aliases,
            dead=[],
        )
        for operand in node.all_input_nodes:
            last_use[numbers[operand]] = len(plan.steps)
        last_use[len(numbers)] = len(plan.steps)
        numbers[node] = len(numbers)
        plan.steps.append(step)
    for slot, step_number in last_use.items():
        plan.steps[step_number].dead.append(slot)
    return plan


#: What begins the names of ops that only the process of the pass can run. Nothing is known of what they return.
_FOREIGN = ("foreign::", "method::", "module::")


#: Tensor methods that cast to a floating dtype, which is the carrier's in any domain.
_CASTS = frozenset({"float", "double", "half", "bfloat16"})


def _carry_over(value: torch.Tensor, **_: Any) -> torch.Tensor:
    return value.to(torch.float64)


def _may_write(node: fx.Node) -> bool:
    """Whether a node may write into its operands: as its schema says, or because nothing is known of it."""
    if node.op == "call_function":
        if isinstance(node.target, torch._ops.OpOverload):
            return bool(node.target._schema.is_mutable)
        return qualified_name(node.target).startswith("foreign::")
    return node.op != "get_attr"


def _op_of(node: fx.Node, module: torch.nn.Module | None) -> Op:
    if node.op == "call_function":
        op = lookup(node.target)
        if op.name.startswith("foreign::") and module is not None:
            return Op(op.name, by_meaning(node.target), aliases=True)  # type: ignore[arg-type]
        return op
    target = str(node.target)
    if node.op == "call_method":
        method = _carry_over if target in _CASTS else getattr(torch.Tensor, target, None)
        return Op(f"method::{target}", method, aliases=True, reason="no such tensor method")
    if module is None:
        return Op(f"{node.op}::{target}", None, reason="the graph's module is not there")
    owner: Any = module
    for part in target.split("."):
        owner = getattr(owner, part)
    if node.op == "get_attr":
        return Op(f"attribute::{target}", lambda: owner, aliases=True)
    try:
        in_domain = copy.deepcopy(owner).to(torch.float64)
    except Exception as error:  # noqa: BLE001 - modules copy and convert themselves as they like
        return Op(f"module::{target}", None, reason=f"it cannot be carried to float64: {_first_line(error)}")
    return Op(f"module::{target}", by_meaning(in_domain), aliases=True)


def _refuse(*_: Any, **__: Any) -> Any:
    raise UnsupportedOp("?", "a plan with unsupported ops was run")


def rank_inputs(plan: Plan, program: Program, rank: int) -> Sequence[torch.Tensor]:
    """Return the inputs of a rank. Plans that write into nothing share them with each other: do not write into them.

    Raises:
        ProgramError: the inputs are too large to make.
    """
    specs = program.specs(rank)
    if plan.mutates or sum(math.prod(spec.shape) for spec in specs) > _KEPT_ELEMENTS:
        return [spec.values(program.mesh, rank, program.seed) for spec in specs]
    return _kept_inputs(specs, program.mesh, rank, program.seed)


#: Most elements of the inputs of one rank that are kept: 64 times so many take 64 MiB.
_KEPT_ELEMENTS = 1 << 17


@lru_cache(maxsize=64)
def _kept_inputs(specs: tuple[InputSpec, ...], mesh: Mesh, rank: int, seed: int) -> list[torch.Tensor]:
    """Inputs as the domain carries them. The original and the rewritten program have the same ones."""
    return [FLOAT64.carry(spec.values(mesh, rank, seed)) for spec in specs]


def _count(value: Any) -> int:
    """How many slots and rank constants an argument template holds."""
    found = 0

    def look(leaf: Any) -> Any:
        nonlocal found
        found += isinstance(leaf, (_Slot, RankConstant))
        return leaf

    map_aggregate(value, look)
    return found


def run_rank(
    plan: Plan,
    rank: int,
    constants: Mapping[str, Any],
    inputs: Sequence[torch.Tensor],
    *,
    observe: bool = False,
    perturb: Callable[[torch.Tensor], torch.Tensor] | None = None,
    domain: Float64 = FLOAT64,
    result: RankResult | None = None,
) -> Generator[tuple[str, Request], torch.Tensor, RankResult]:
    """Run one rank. Yields (node name, request) at every collective and is sent its result.

    Args:
        inputs: values of the placeholders; the graph may write into them.
        observe: keep every node's value in the result.
        perturb: changes the result of every op that returns a fresh tensor; for the conditioning probe.
        result: is filled in as the rank goes on, so that it says how far a rank came that never ends.

    Returns:
        The rank's result; an op that raises ends the rank with `error` set.

    Raises:
        UnsupportedOp: an op has no meaning for these arguments.
    """
    result = RankResult(rank) if result is None else result
    values: list[Any] = [domain.carry(value) for value in inputs]
    carried = values[:]
    if observe:
        result.values = {name: value.clone() for name, value in zip(plan.placeholders, values, strict=True)}

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, _Slot):
            return values[leaf.index]
        return constant_value(leaf, constants) if isinstance(leaf, RankConstant) else leaf

    for step in plan.steps:
        kwargs = step.kwargs
        if step.nested:
            args = [map_aggregate(a, fill) for a in step.args]
            kwargs = dict(map_aggregate(kwargs, fill))
        else:
            args = step.args.copy()
            for position, slot in step.slots:
                args[position] = values[slot]
        try:
            if step.collective:
                value = yield from _collective(step, rank, args, kwargs, result)
            else:
                value = step.run(*args, **kwargs)
        except UnsupportedOp:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a kernel is an observation about the program
            result.error = NodeError(step.name, f"{type(error).__name__}: {_first_line(error)}")
            return result
        if step.carry:
            value = domain.carry(value)
        if perturb is not None and step.perturbable:
            value = pytree.tree_map_only(torch.Tensor, perturb, value)
        values.append(value)
        if result.values is not None:
            result.values[step.name] = pytree.tree_map_only(torch.Tensor, torch.clone, value)
        for slot in step.dead:
            values[slot] = None
    flat, tree = pytree.tree_flatten(map_aggregate(plan.result, fill))
    result.outputs, result.structure = flat, str(tree)
    result.inputs, result.input_names, result.mutates = carried, plan.placeholders, plan.mutates
    return result


def _collective(
    step: _Step, rank: int, args: list[Any], kwargs: dict[str, Any], result: RankResult
) -> Generator[tuple[str, Request], torch.Tensor, Any]:
    steps = step.run(rank, *args, **kwargs)
    answer: torch.Tensor | None = None
    while True:
        try:
            request = next(steps) if answer is None else steps.send(answer)
        except StopIteration as stop:
            return stop.value
        result.calls.append(Call(step.name, request.collective))
        answer = yield step.name, request


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"


def check_supported(plans: Sequence[Plan]) -> None:
    """Raise `UnsupportedOp` naming the first op without a meaning."""
    for plan in plans:
        for sentence in plan.unsupported:
            name, _, reason = sentence.partition(": ")
            raise UnsupportedOp(name, reason)
