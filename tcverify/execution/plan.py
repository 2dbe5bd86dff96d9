"""Plans: graphs prepared for running. What is asked of FX is asked once per graph, not once per rank and run."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.domains import FLOAT64, Domain
from tcverify.errors import TcverifyError, UnsupportedOp
from tcverify.ops import Group, Op, drop_device, lookup, qualified_name, resolve, run_by_meaning, schema_of
from tcverify.ops.leaves import leaves
from tcverify.ops.signature import wrong_dtype
from tcverify.program import Mesh, Program
from tcverify.program.graph import RankConstant, Slot, constant_value
from tcverify.program.values import NotSerialisable, ValueReader, encode_value


@dataclass(slots=True)
class PlanStep:
    """One call.

    Attributes:
        name: of the node.
        op: what is called.
        slots: (position in args, number of a value), for arguments that are plain values.
        nested: whether args or kwargs hold slots or rank constants elsewhere.
        carry: whether the result may have another floating dtype than the domain's.
        native: whether it runs in the dtypes of the program.
        writes: whether it may write into its operands.
        dead: values that are not read after this step.
    """

    name: str
    op: Op
    args: list[Any]
    kwargs: dict[str, Any]
    slots: list[tuple[int, int]]
    nested: bool
    carry: bool
    dead: list[int] = field(default_factory=list)
    native: bool = False
    writes: bool = False
    run: Callable[..., Any] = field(init=False)

    def __post_init__(self) -> None:
        self.run = (self.op.native if self.native else None) or self.op.run or _refuse

    @property
    def constant(self) -> bool:
        """Whether it reads an attribute: what belongs to the graph, not to its inputs."""
        return self.op.name.startswith("attribute::")


@dataclass(slots=True)
class ExecutionPlan:
    """A graph, prepared for running in a number domain."""

    placeholders: list[str]
    steps: list[PlanStep]
    result: Any
    unsupported: list[str]  # sentences naming each op without a meaning

    @property
    def mutates(self) -> bool:
        """Whether it may write into anything that is there before."""
        return any(step.writes for step in self.steps)

    @property
    def overlapped(self) -> list[str]:
        """Nodes that start collectives during which others run: not of those that the next node waits for."""
        found = []
        for number, step in enumerate(self.steps):
            if step.op.phase == "start":
                started = len(self.placeholders) + number
                after = self.steps[number + 1 : number + 2]
                if not any(next_.op.phase == "wait" and next_.slots == [(0, started)] for next_ in after):
                    found.append(step.name)
        return found


_PLANS: weakref.WeakKeyDictionary[fx.Graph, dict[bool, ExecutionPlan]] = weakref.WeakKeyDictionary()


def plan_of(graph: fx.Graph, module: torch.nn.Module | None = None, domain: Domain = FLOAT64) -> ExecutionPlan:
    """Return the plan of a graph, made once per graph and carrier: domains that carry by float64 share it.

    Args:
        module: owns the attributes and submodules that the graph refers to.
    """
    plans = _PLANS.setdefault(graph, {})
    plan = plans.get(domain.carries)
    if plan is None:
        plan = plans[domain.carries] = _make_plan(graph, module, domain)
    return plan


def plans_of(program: Program, domain: Domain = FLOAT64) -> list[ExecutionPlan]:
    """Return the plan of every graph of a program."""
    modules = program.modules or (None,) * len(program.graphs)
    return [plan_of(graph, module, domain) for graph, module in zip(program.graphs, modules, strict=True)]


def _make_plan(graph: fx.Graph, module: torch.nn.Module | None, domain: Domain) -> ExecutionPlan:
    numbers: dict[fx.Node, int] = {}
    last_use: dict[int, int] = {}
    plan = ExecutionPlan([], [], None, [])

    def template(value: Any) -> Any:
        return Slot(numbers[value]) if isinstance(value, fx.Node) else drop_device(domain.literal(value))

    for node in graph.nodes:  # passes may leave one behind a call
        if node.op == "placeholder":
            numbers[node] = len(numbers)
            plan.placeholders.append(node.name)
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            plan.result = map_aggregate(node.args[0], template)
            for operand in node.all_input_nodes:
                last_use.pop(numbers[operand], None)
            break
        op = _op_of(node, module, domain)
        if op.run is None:
            plan.unsupported.append(_unsupported(op, node.name))
        step = _step_of(node, op, numbers, template, not domain.carries)
        for operand in node.all_input_nodes:
            last_use[numbers[operand]] = len(plan.steps)
        last_use[len(numbers)] = len(plan.steps)
        numbers[node] = len(numbers)
        plan.steps.append(step)
    for slot, step_number in last_use.items():
        plan.steps[step_number].dead.append(slot)
    return plan


#: Types of arguments that a plan contains unchanged.
_PLAIN = (int, float, str, type(None))


def _step_of(
    node: fx.Node, op: Op, numbers: Mapping[fx.Node, int], template: Callable[[Any], Any], native: bool
) -> PlanStep:
    """The step of a node.

    Args:
        numbers: of the values before it.
        template: converts a leaf of an argument to its form in the plan.
    """
    args: list[Any] = []
    slots: list[tuple[int, int]] = []
    kwargs = dict(map_aggregate(node.kwargs, template)) if node.kwargs else {}
    group = None
    if op.group is not None:
        group = _group_position(node, op)
        if op.group in kwargs:
            kwargs[op.group] = _group_constant(kwargs[op.group])
    plain = not (kwargs and _count(kwargs))
    for position, argument in enumerate(node.args):
        if isinstance(argument, fx.Node):
            slots.append((position, numbers[argument]))
            args.append(Slot(numbers[argument]))
        elif position == group:
            args.append(_group_constant(argument))
            plain = False
        elif isinstance(argument, _PLAIN):
            args.append(argument)
        else:
            args.append(map_aggregate(argument, template))
            plain = plain and not _count(args[-1])
    carry = not op.aliases or not node.all_input_nodes or op.name.startswith(_FOREIGN)
    return PlanStep(node.name, op, args, kwargs, slots, not plain, carry, native=native, writes=_may_write(node))


def _group_position(node: fx.Node, op: Op) -> int | None:
    schema = schema_of(node.target)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return names.index(op.group) if op.group in names else None


def _group_constant(name: Any) -> Any:
    """Placeholder in a plan for the group of this name, as the rank sees it; see `rank_constants`."""
    return RankConstant(_GROUP + name) if isinstance(name, str) else name


def group_name(argument: Any) -> str | None:
    """The name of the group that an argument in a plan represents; None for other arguments."""
    if isinstance(argument, RankConstant) and argument.name.startswith(_GROUP):
        return argument.name.removeprefix(_GROUP)
    return None


#: Prefix of the names of rank constants for groups.
_GROUP = "group:"


def rank_constants(mesh: Mesh, rank: int, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a plan's rank constants on a rank: those of the program, and the groups of its mesh."""
    groups = {_GROUP + dim.name: Group(dim.name, dim.group(rank)) for dim in mesh.dims}
    return {**groups, **constants}


def known_constant(constant: RankConstant, constants: Mapping[str, Any]) -> Any:
    """The value of a rank constant. A group that the mesh does not have comes as its name: ops refuse that."""
    if constant.name not in constants and constant.name.startswith(_GROUP):
        return constant.name.removeprefix(_GROUP)
    return constant_value(constant, constants)


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
            if lookup(node.target).phase == "wait":
                return False  # results in flight were counted at the start
            schema = schema_of(node.target)
            return bool(schema is not None and schema.is_mutable)
        return qualified_name(node.target).startswith("foreign::")
    return node.op != "get_attr"


def _op_of(node: fx.Node, module: torch.nn.Module | None, domain: Domain) -> Op:
    if node.op == "call_function":
        op = lookup(node.target)
        if op.name.startswith("foreign::") and module is not None:
            return Op(op.name, run_by_meaning(node.target), aliases=True)  # type: ignore[arg-type]
        problem = wrong_dtype(node.target, node.args, node.kwargs)
        return op if problem is None or op.run is None else replace(op, run=partial(_raise, problem), native=None)
    target = str(node.target)
    if node.op == "call_method":
        method = _carry_over if target in _CASTS and domain.carries else getattr(torch.Tensor, target, None)
        return Op(f"method::{target}", method, aliases=True, reason="no such tensor method")
    if module is None:
        return Op(f"{node.op}::{target}", None, reason="the graph's module is not there")
    owner: Any = module
    for part in target.split("."):
        owner = getattr(owner, part)
    if node.op == "get_attr":
        return Op(f"attribute::{target}", lambda: owner, aliases=True)
    try:
        in_domain = copy.deepcopy(owner).to(torch.float64) if domain.carries else copy.deepcopy(owner)
    except Exception as error:  # noqa: BLE001 - modules copy and convert themselves as they like
        return Op(f"module::{target}", None, reason=f"it cannot be carried to float64: {first_line(error)}")
    return Op(f"module::{target}", run_by_meaning(in_domain), aliases=True)


def _unsupported(op: Op, node: str) -> str:
    return f"{op.name} ({node}): {op.reason}"


def _raise(problem: str, *_: Any, **__: Any) -> Any:
    raise ValueError(problem)


def _refuse(*_: Any, **__: Any) -> Any:
    raise UnsupportedOp("?", "a plan with unsupported ops was run")


def _count(value: Any) -> int:
    """How many slots and rank constants an argument template holds."""
    return len(leaves(value, Slot)) + len(leaves(value, RankConstant))


def first_line(error: Exception) -> str:
    """The message of an error on one line, with its hint if it has one."""
    text = (error.message if isinstance(error, TcverifyError) else str(error)).strip()
    said = text.splitlines()[0] if text else "no message"
    return f"{said} ({error.hint})" if isinstance(error, TcverifyError) and error.hint else said


#: Types that may contain tensors that are not residues.
_OPAQUE = ("foreign::", "module::")


def check_supported(plans: Sequence[ExecutionPlan], domain: Domain = FLOAT64) -> None:
    """Raise `UnsupportedOp` naming the first op without a meaning in a domain."""
    for plan in plans:
        if domain.kind == "exact":
            opaque = next((step for step in plan.steps if step.op.name.startswith(_OPAQUE)), None)
            if opaque is not None:
                raise UnsupportedOp(opaque.op.name, f"the exact domain cannot look into it ({opaque.name})")
        for sentence in plan.unsupported:
            name, _, reason = sentence.partition(": ")
            raise UnsupportedOp(name, reason)


# ------------------------------------------------------------------------------------------------------- as messages


def encode_plan(plan: ExecutionPlan) -> list[Any]:
    """Write a plan as JSON-able data, for a process that has no use for the graph.

    Raises:
        NotSerialisable: it holds what messages cannot.
    """
    steps = []
    for step in plan.steps:
        slots = {position for position, _ in step.slots}
        args = [
            None if i in slots and not step.nested else encode_value(argument) for i, argument in enumerate(step.args)
        ]
        kwargs = {key: encode_value(value) for key, value in step.kwargs.items()}
        if step.op.name.startswith((*_FOREIGN, "attribute::")):
            raise NotSerialisable(f"node '{step.name}' calls {step.op.name}, which this process alone has")
        steps.append(
            [step.name, step.op.name, args, kwargs, step.slots, step.nested, step.carry, step.dead, step.writes]
        )
    return [plan.placeholders, steps, encode_value(plan.result)]


def decode_plan(data: list[Any], domain: Domain = FLOAT64) -> ExecutionPlan:
    """Read what `encode_plan` wrote of a plan for this domain.

    Raises:
        UnsupportedOp: the tables of this process do not know an op.
    """
    placeholders, steps, result = data
    slots = {number: Slot(number) for number in range(len(placeholders) + len(steps))}
    reader = ValueReader("the message")
    plan = ExecutionPlan(placeholders, [], reader.value(result, slots, "the output"), [])
    ops: dict[str, Op] = {}
    for name, op_name, args, kwargs, positions, nested, carry, dead, writes in steps:
        op = ops.get(op_name) or ops.setdefault(op_name, lookup(resolve(op_name)))
        if op.run is None:
            plan.unsupported.append(_unsupported(op, name))
        # None marks a slot, which is filled in for each call: most arguments are slots
        args = [value if value is None else reader.value(value, slots, name) for value in args]
        kwargs = {key: reader.value(value, slots, name) for key, value in kwargs.items()} if kwargs else kwargs
        native = not domain.carries
        plan.steps.append(
            PlanStep(name, op, args, kwargs, positions, nested, carry, dead, native=native, writes=writes)
        )
    return plan
