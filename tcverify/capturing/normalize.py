"""Brings a captured FX graph into the plain form that programs have.

Attributes become inputs, symbolic sizes become numbers, inputs that are not tensors and assertions go, everything runs on the
CPU. A graph of torch functions (as TorchDynamo makes it) is traced down to aten first. Names of nodes stay.
"""

from __future__ import annotations

import itertools
import keyword
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tcverify.capturing.c10d_calls import to_functional_collectives
from tcverify.capturing.groups import find_known_groups, group_names_in
from tcverify.capturing.recipes import digest_of, recipe_of
from tcverify.capturing.record import Captured, CapturedInput, GroupFacts, InputRole
from tcverify.capturing.symbolic_sizes import concrete_size, spec_of
from tcverify.errors import ProgramError, UnsupportedOp
from tcverify.ops import ShapeError, TensorSpec, infer, new_fake_mode, qualified_name
from tcverify.program import Placement
from tcverify.program.graph import KEPT_META, add_node

#: Tensors that hold other ones, whose values a graph of plain tensors cannot read.
_WRAPPERS = frozenset({"AsyncCollectiveTensor", "DTensor"})


@dataclass(frozen=True, slots=True)
class InputFacts:
    """What is known of an input besides its shape. Fields: see `CapturedInput`."""

    role: InputRole = "input"
    placements: tuple[tuple[str, Placement], ...] | None = None
    shape: tuple[int, ...] | None = None
    value: torch.Tensor | None = None


_CPU = torch.device("cpu")

#: Ops that only check what is known when the graph is captured, or mark regions for a profiler.
_ASSERTIONS = re.compile(
    r"aten::(_assert_|sym_constrain_range|_functional_assert|_functional_sym_constrain)|profiler::_record"
)


def plain(
    module: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    facts: Mapping[str, InputFacts] | None = None,
    groups: Mapping[str, GroupFacts] | None = None,
) -> Captured:
    """Bring the graph of one rank into plain form. `module` stays as it is.

    Args:
        example_inputs: in the order of the placeholders, for graphs whose metadata says nothing of their shapes.
        facts: what is known of inputs, by name of the placeholder.
        groups: what is known of groups; others are asked of this process.

    Raises:
        ProgramError: the graph lacks what it takes; the message names the node.
    """
    notes: list[str] = []
    if example_inputs is not None:
        example_inputs = _in_order(module, example_inputs)
    if not all(map(_is_plain_call, module.graph.nodes)):
        module = _traced(module, example_inputs)
        example_inputs = None
        notes.append("the graph calls torch functions and modules: it was traced down to aten")
    eager = module
    module = to_functional_collectives(eager)
    if module is not eager:
        notes.append(
            "the graph calls process groups: their collectives were written as functional ones, each waited for at once"
        )
    known = {**find_known_groups(group_names_in(module.graph)), **(groups or {})}
    ranks = {name: one.ranks for name, one in known.items()}
    writer = _Writer(module, dict(facts or {}), example_inputs, ranks)
    graph = writer.write()
    if writer.reordered:
        notes.append(f"treated as contiguous, although they were not: {', '.join(writer.reordered)}")
    used = group_names_in(graph)
    return Captured(
        graph,
        tuple(writer.inputs),
        {name: known[name] for name in used if name in known},
        module=writer.owner,
        notes=tuple(notes),
    )


def _in_order(module: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    number = sum(node.op == "placeholder" for node in module.graph.nodes)
    flat = list(example_inputs)
    if len(flat) != number:
        flat = pytree.tree_leaves(flat)
    if len(flat) != number:
        raise ProgramError(f"the graph takes {number} inputs, but {len(flat)} examples are given")
    return flat


def _is_plain_call(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return True
    if qualified_name(node.target).startswith("python::"):
        return True
    return getattr(node.target, "__module__", "") in _ON_NUMBERS and _gives_numbers(node)


def _gives_numbers(node: fx.Node) -> bool:
    """Whether a call computes on sizes: torch.relu and operator.iadd stand in the same modules as torch.sym_max."""
    if not node.all_input_nodes:
        return True
    leaves = pytree.tree_leaves(_value(node))
    return bool(leaves) and not any(isinstance(leaf, torch.Tensor) for leaf in leaves) and leaves != [None]


#: Modules whose functions compute on sizes in captured graphs; such calls become numbers.
_ON_NUMBERS = ("_operator", "operator", "math", "torch", "builtins")


def _value(node: fx.Node) -> Any:
    """What is known of a node's value: AOTAutograd, make_fx and torch.export write "val", TorchDynamo "example_value"."""
    return node.meta.get("val", node.meta.get("example_value"))


def _traced(module: fx.GraphModule, example_inputs: Sequence[Any] | None) -> fx.GraphModule:
    """Trace a graph of torch functions down to aten, on fake tensors of the shapes that it was captured with."""
    mode = new_fake_mode()
    values = []
    for number, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder"):
        value = example_inputs[number] if example_inputs is not None else _value(node)
        if isinstance(value, torch.Tensor):
            _require_plain(value, f"input '{node.name}'")
            spec = spec_of(value, f"input '{node.name}'", {})
            with mode:
                value = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        elif value is None:
            raise _no_shape(node)
        values.append(concrete_size(value, f"input '{node.name}'"))
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        _require_plain(value, f"attribute '{name}'")
    names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    held = [(b, b.detach().clone()) for b in module.buffers() if not isinstance(b, FakeTensor)]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about unneeded gradients
            traced = make_fx(module, tracing_mode="real", _allow_non_fake_inputs=True)(*values)
    except Exception as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise ProgramError(
            f"the graph cannot be traced down to aten: {type(error).__name__}: {text[0]}",
            "capture it with make_fx or AOTAutograd (aot_export_joint_with_descriptors) and give that graph",
        ) from error
    finally:  # real buffers are written into (BatchNorm counts its calls)
        for buffer, before in held:
            if not torch.equal(buffer, before):
                buffer.data.copy_(before)
    for node, name in zip((n for n in traced.graph.nodes if n.op == "placeholder"), names, strict=True):
        node._rename(name)
    return traced


def _require_plain(value: torch.Tensor, where: str) -> None:
    """Refuse tensors that wrap others (DTensor): a graph does not show what it does with them."""
    if is_traceable_wrapper_subclass(value):
        raise ProgramError(
            f"{where} is a {type(value).__name__}, and the graph does not show what happens to its parts",
            "capture the graph after AOTAutograd: by tcverify.capture, or by torch.compile with backend aot_autograd(…)",
        )


def _no_shape(node: fx.Node) -> ProgramError:
    return ProgramError(
        f"the shape of input '{node.name}' is unknown: it has no meta['val']",
        "return the graph with example inputs, as (graph_module, example_inputs), or capture it on fake tensors",
    )


class _Writer:
    """Writes the plain graph, node by node."""

    def __init__(
        self,
        module: fx.GraphModule,
        facts: dict[str, InputFacts],
        example_inputs: Sequence[Any] | None,
        groups: Mapping[str, Sequence[int]],
    ) -> None:
        self._groups = groups
        self.inputs: list[CapturedInput] = []
        self.reordered: list[str] = []  # inputs that do not lie in memory in the order of their dims
        self.owner: torch.nn.Module | None = None
        self._module = module
        self._facts = facts
        self._examples = example_inputs
        self._aliases: dict[int, int] = {}
        self._keep: list[Any] = []  # tensors whose storages are numbered must stay alive
        self._fresh = itertools.count(1 << 20).__next__  # numbers of storages that no tensor of the metadata has
        self._graph = fx.Graph()
        self._made: dict[fx.Node, Any] = {}
        self._lifted: dict[Any, fx.Node] = {}
        self._tensors: dict[
            fx.Node, tuple[fx.Node, InputRole, torch.Tensor | None]
        ] = {}  # of inputs, until their readers are known

    def write(self) -> fx.Graph:
        nodes = list(self._module.graph.nodes)
        attributes = [node for node in nodes if node.op == "get_attr"]
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for number, node in enumerate(placeholders):
            self._placeholder(node, None if self._examples is None else self._examples[number])
        for node in attributes:
            self._attribute(node)
        for node in nodes:
            if node.op == "output":
                result = map_aggregate(node.args[0], self._argument)
                made = add_node(self._graph, "output", "output", (self._returned(result),), {}, "output")
                self._copy_meta(node, made)
            elif node.op not in ("placeholder", "get_attr"):
                self._call(node)
        self._describe_inputs()
        return self._graph

    # ------------------------------------------------------------------------------------------------------ inputs

    def _placeholder(self, node: fx.Node, example: Any) -> None:
        value = _value(node)
        value = example if value is None else value
        where = f"input '{node.name}'"
        if isinstance(value, torch.Tensor):
            fact = self._facts.get(node.name, InputFacts())
            known = fact.value if fact.value is not None else example if isinstance(example, torch.Tensor) else None
            self._input(node, node.name, value, fact, known)
        elif value is None and node.users and "val" not in node.meta and example is None:
            raise _no_shape(node)
        else:
            self._made[node] = self._constant(concrete_size(value, where))

    @staticmethod
    def _constant(value: Any) -> Any:
        """A value that is not a tensor, for the graph to contain; objects (a device mesh) are passed on, never read."""
        return value if isinstance(value, (int, float, bool, str, torch.dtype)) else None

    def _attribute(self, node: fx.Node) -> None:
        value: Any = self._module
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        if isinstance(value, torch.nn.Module):
            made = add_node(self._graph, "get_attr", node.target, (), {}, node.name)
            self._made[node] = made
            self.owner = self._module
            return
        if not isinstance(value, torch.Tensor):
            self._made[node] = self._constant(value)
            return
        if type(value).__name__ in _WRAPPERS:
            raise ProgramError(
                f"node '{node.name}' is a {type(value).__name__} that the capture did not unpack",
                "return and close over plain tensors (.to_local(), .wait()), or capture the model with tcverify.capture",
            )
        if node.target in self._lifted:
            self._made[node] = self._lifted[node.target]
            return
        known = self._facts.get(str(node.target))
        role: InputRole = "parameter" if isinstance(value, torch.nn.Parameter) else "constant"
        fact = known if known is not None else InputFacts(role, value=value)
        self._lifted[node.target] = self._input(node, _identifier(str(node.target)), value, fact, fact.value)

    def _input(
        self, node: fx.Node, name: str, value: torch.Tensor, fact: InputFacts, known: torch.Tensor | None
    ) -> fx.Node:
        _require_plain(value, f"input '{name}'")
        spec = self._spec(value, f"input '{name}'")
        made = add_node(self._graph, "placeholder", name, (), {}, name)
        made.target = made.name
        plain = TensorSpec.contiguous(spec.shape, spec.dtype)
        if plain.layout != spec.layout:
            self.reordered.append(made.name)
        made.meta["val"] = TensorSpec(plain.shape, plain.stride, plain.dtype, 0, spec.alias)
        self._made[node] = made
        self._tensors[made] = (node, fact.role, known)
        self.inputs.append(CapturedInput(made.name, made.meta["val"], fact.role, fact.placements, fact.shape))
        return made

    def _describe_inputs(self) -> None:
        """Choose recipes, now that the readers of the inputs are known."""
        described = []
        for one, (node, (_, role, known)) in zip(self.inputs, self._tensors.items(), strict=True):
            recipe = recipe_of(node, one.spec, role, known)
            described.append(replace(one, recipe=recipe, digest=digest_of(recipe, role, known)))
        self.inputs = described

    # ------------------------------------------------------------------------------------------------------- calls

    def _call(self, node: fx.Node) -> None:
        where = f"node '{node.name}'"
        value = _value(node)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self._made[node] = concrete_size(value, where)
            return
        if node.op == "call_function" and _ASSERTIONS.match(qualified_name(node.target)):
            self._made[node] = None
            return
        args = map_aggregate(node.args, self._argument)
        kwargs = {key: map_aggregate(v, self._argument) for key, v in node.kwargs.items()}
        if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and self._on_numbers(args):
            try:
                self._made[node] = node.target(*args, **kwargs)  # type: ignore[operator] # sizes, computed with Python's own operators
                return
            except (ArithmeticError, TypeError, ValueError) as error:
                raise ProgramError(f"{where} cannot be computed when it is captured: {error}") from None
        made = add_node(self._graph, node.op, node.target, tuple(args), kwargs, node.name)
        self._made[node] = made
        self._copy_meta(node, made)
        if value is not None:
            made.meta["val"] = pytree.tree_map(lambda v: self._leaf(v, where), value)
        elif node.op == "call_function":
            self._infer(made)

    @staticmethod
    def _on_numbers(args: Any) -> bool:
        flat = pytree.tree_leaves(args)
        return bool(flat) and all(isinstance(v, (int, float, bool)) for v in flat)

    def _infer(self, made: fx.Node) -> None:
        """Infer the shape of a node whose metadata lacks it."""

        def known(value: Any) -> Any:
            return value.meta.get("val") if isinstance(value, fx.Node) else value

        if any("val" not in operand.meta for operand in made.all_input_nodes):
            return
        try:
            args, kwargs = map_aggregate(made.args, known), dict(map_aggregate(made.kwargs, known))
            made.meta["val"] = infer(made.target, args, kwargs, self._fresh, self._groups)
        except (ShapeError, UnsupportedOp):
            return

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._made[value]
        if isinstance(value, torch.device):
            return _CPU
        return concrete_size(value, "an argument")

    def _leaf(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._spec(value, where)
        value = concrete_size(value, where)
        return value if isinstance(value, (int, float, bool, type(None))) else None

    def _spec(self, value: torch.Tensor, where: str) -> TensorSpec:
        self._keep.append(value)
        return spec_of(value, where, self._aliases)

    @staticmethod
    def _returned(result: Any) -> Any:
        """What a graph returns, in plain containers: torch.fx has its own."""
        if isinstance(result, tuple):
            return tuple(map(_Writer._returned, result))
        if isinstance(result, list):
            return [_Writer._returned(v) for v in result]
        return result

    @staticmethod
    def _copy_meta(node: fx.Node, made: fx.Node) -> None:
        made.meta.update({key: node.meta[key] for key in KEPT_META if key in node.meta})


def _identifier(text: str) -> str:
    name = re.sub(r"\W", "_", text)
    return f"p_{name}" if not name or name[0].isdigit() or keyword.iskeyword(name) else name


__all__ = ["InputFacts", "plain"]
