"""What one call of a pass did to the graph of one rank, as data that can travel to another rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from tcverify.application.apply import defects_of, signature
from tcverify.application.pair import Defect
from tcverify.capturing import Captured, CapturedInput, GroupFacts, InputFacts, plain
from tcverify.capturing.groups import group_names_in, rank_lists
from tcverify.capturing.recipes import given_recipe as given_values
from tcverify.capturing.transport import decode_captured, encode_captured
from tcverify.compile_check.pass_calls import PassCall, get_module_attribute
from tcverify.errors import ProgramError
from tcverify.ops import define_ops
from tcverify.program.graph import KEPT_META, add_node, copy_graph, same_structure
from tcverify.program.inputs import MAX_GIVEN


@dataclass(frozen=True, slots=True)
class Observation:
    """The graph of one rank before and after a pass. Both take the same inputs in the same order.

    Attributes:
        after: None where the pass left no graph that can be read.
        changed: whether the pass changed what the graph does, or what it declares.
        touched: whether the pass changed anything, be it metadata alone.
        defects: what is wrong with the graph as FX sees it.
        listing: the graph after the pass as text, where `after` is None.
        rewrites: what the pass says it has rewritten.
    """

    before: Captured
    after: Captured | None
    changed: bool
    touched: bool
    defects: tuple[Defect, ...] = ()
    listing: str = ""
    rewrites: dict[str, int] = field(default_factory=dict)

    @property
    def local(self) -> bool:
        """Whether the graph has to do with this rank alone, before and after."""
        return is_local(self.before) and (self.after is None or is_local(self.after))

    def alone(self) -> Observation:
        """The same without what it says of other ranks."""

        def own(captured: Captured) -> Captured:
            inputs = tuple(replace(one, placements=None, shape=None) for one in captured.inputs)
            return replace(captured, inputs=inputs, groups={})

        return replace(self, before=own(self.before), after=None if self.after is None else own(self.after))


def is_local(captured: Captured) -> bool:
    """Whether a graph names no group of ranks."""
    return not group_names_in(captured.graph) and not rank_lists(captured.graph)


class GraphBefore:
    """A graph as it was before the pass, read."""

    def __init__(self, called: PassCall, facts: Mapping[str, InputFacts], groups: Mapping[str, GroupFacts]) -> None:
        define_ops()
        self.takes = signature(called.graph)
        self.annotated = all(n.op in ("placeholder", "output", "get_attr") or _has_value(n) for n in called.graph.nodes)
        self._given, self._facts, self._groups = called, facts, groups
        self._versions = {name: _version(value) for name, value in called.attributes.items()}
        self.captured = self._read(called.saved, called.owner)

    def _read(self, graph: fx.Graph, owner: torch.nn.Module | None) -> Captured:
        module = fx.GraphModule(owner if owner is not None else {}, copy_graph(graph))
        captured = plain(module, self._given.example_inputs, self._facts, self._groups)
        return replace(captured, groups={**self._groups, **captured.groups})

    def observe(
        self,
        left: tuple[fx.Graph, fx.GraphModule | None] | Defect,
        rank: int,
        *,
        metadata: bool,
        rewrites: Mapping[str, int],
    ) -> Observation:
        """Read the graph that the pass has left.

        Args:
            metadata: whether the pass promises metadata, so that what is missing counts.

        Raises:
            ProgramError: what the pass has left cannot be compared with what it was given.
        """
        if isinstance(left, Defect):
            return Observation(self.captured, None, True, True, (left,), "", dict(rewrites))
        graph, owner = left
        defects = defects_of(self.takes, graph, rank)
        if graph is not self._given.graph and not same_structure(self._given.saved, self._given.graph):
            message = "it changed its input graph, although it returned a new one"
            defects.append(Defect("input-mutated", rank, message))
        if any(defect.aspect in ("lint", "signature") for defect in defects):
            return Observation(self.captured, None, True, True, tuple(defects), _text(graph), dict(rewrites))
        after = self._read(graph, owner)
        if metadata and self.annotated:
            missing = {n.name for n in graph.nodes if n.op == "call_function" and not _has_value(n)}
            for node in after.graph.nodes:
                if node.name in missing:
                    node.meta.pop("val", None)
        before, after = self._alike(after, owner)
        changed = not same_structure(before.graph, after.graph)
        touched = changed or _meta(before.graph, ("val", *KEPT_META)) != _meta(after.graph, ("val", *KEPT_META))
        changed = changed or (touched and _meta(before.graph, _DECLARED) != _meta(after.graph, _DECLARED))
        return Observation(before, after, changed, touched, tuple(defects), "", dict(rewrites))

    def _alike(self, after: Captured, owner: fx.GraphModule | None) -> tuple[Captured, Captured]:
        """Both captures with the inputs of both, in one order. Attributes that the pass dropped or added are inputs, too."""
        before = self.captured
        taken = sum(node.op == "placeholder" for node in self._given.saved.nodes)
        own = {n.name for n in self._given.saved.nodes if n.op == "placeholder"}
        number = min(taken, sum(one.name in own for one in before.inputs))
        known = {one.name for one in before.inputs}
        names = {one.name: known_.name for one, known_ in zip(after.inputs[:number], before.inputs, strict=False)}
        added = [one for one in after.inputs[number:] if one.name not in known]
        changed = [
            name for name, version in self._versions.items()
            if (value := get_module_attribute(owner, name)) is not None and _version(value) != version
        ]  # fmt: skip
        if changed:
            raise ProgramError(
                f"the pass changes the values of the attribute '{changed[0]}', from which the graph before the pass can "
                "no longer be told",
                "let it register a new attribute",
            )
        inputs: Sequence[CapturedInput] = [*before.inputs, *added]
        if added:
            inputs = _as_they_are(inputs[:number], inputs[number:], self._given, owner)
        return _taking(before, inputs, {}), _taking(after, inputs, names)


#: Metadata that says what a graph is to do, where the rest says what it does.
_DECLARED = ("after", "comm_buffer")


def _as_they_are(
    taken: Sequence[CapturedInput], lifted: Sequence[CapturedInput], given: PassCall, owner: fx.GraphModule | None
) -> list[CapturedInput]:
    """Give attributes the values that they have: a new one may have been computed from others."""
    values = {name: value for name, value in given.attributes.items() if isinstance(value, torch.Tensor)}
    if owner is not None:
        for node in owner.graph.nodes:
            if node.op == "get_attr":
                values.setdefault(str(node.target), get_module_attribute(owner, str(node.target)))
    by_identifier = {name.replace(".", "_"): value for name, value in values.items()}
    found = list(taken)
    for one in lifted:
        value = by_identifier.get(one.name.removeprefix("p_"), by_identifier.get(one.name))
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or value.numel() > MAX_GIVEN:
            raise ProgramError(
                f"the pass adds attributes to the graph, and the values of '{one.name}' are not known or more than {MAX_GIVEN}",
            )
        found.append(replace(one, recipe=given_values(value), role="constant"))
    return found


def _taking(captured: Captured, inputs: Sequence[CapturedInput], names: Mapping[str, str]) -> Captured:
    """The same graph with these inputs, in this order.

    Args:
        names: new names of its own inputs.
    """
    own = {names.get(n.name, n.name): n for n in captured.graph.nodes if n.op == "placeholder"}
    order = [one.name for one in inputs]
    if list(own) == order and not any(old != new for old, new in names.items()):
        return replace(captured, inputs=tuple(inputs))
    ordered = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for one in inputs:
        node = add_node(ordered, "placeholder", one.name, (), {}, one.name)
        node.target = node.name
        node.meta["val"] = one.spec
        if one.name in own:
            node.meta.update(own[one.name].meta)
            made[own[one.name]] = node
    for node in captured.graph.nodes:
        if node.op != "placeholder":
            made[node] = ordered.node_copy(node, made.__getitem__)
    return replace(captured, graph=ordered, inputs=tuple(inputs))


def _has_value(node: fx.Node) -> bool:
    return "val" in node.meta or "example_value" in node.meta


def _version(value: Any) -> Any:
    return (id(value), value._version) if isinstance(value, torch.Tensor) and not value.is_inference() else id(value)


def _meta(graph: fx.Graph, keys: Sequence[str]) -> list[tuple[Any, ...]]:
    return [tuple(node.meta.get(key) for key in keys) for node in graph.nodes]


def _text(graph: fx.Graph) -> str:
    try:
        return str(graph)
    except Exception:  # noqa: BLE001 - a graph can be too broken to be looked at
        return ""


def encode_observation(seen: Observation) -> dict[str, Any]:
    """Write an observation as JSON-able data. Raises as `encode_captured` does."""
    return {
        "before": encode_captured(seen.before),
        "after": None if seen.after is None else encode_captured(seen.after),
        "changed": seen.changed,
        "touched": seen.touched,
        "defects": [asdict(defect) for defect in seen.defects],
        "listing": seen.listing,
        "rewrites": seen.rewrites,
    }


def decode_observation(data: Any, where: str) -> Observation:
    """Read what `encode_observation` wrote. Raises as `decode_captured` does."""
    return Observation(
        decode_captured(data["before"], where),
        None if data["after"] is None else decode_captured(data["after"], where),
        data["changed"],
        data["touched"],
        tuple(Defect(**defect) for defect in data["defects"]),
        data["listing"],
        data["rewrites"],
    )


__all__ = ["GraphBefore", "Observation", "decode_observation", "encode_observation", "is_local"]
