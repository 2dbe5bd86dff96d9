"""Reinplacing of FSDP's all_gathers: into the buffer that already contains this rank's slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from tcverify.ops import resolve
from tcverify.passes.base import Pass
from tcverify.passes.editing import infer_metadata, known_spec, named_arguments, op_name
from tcverify.passes.overlap.fsdp import GATHER, GATHER_OUT, annotate_aliases, find_copy_in
from tcverify.passes.overlap.reordering import is_lowered
from tcverify.passes.storages import accesses
from tcverify.program import Contract


@dataclass(frozen=True, slots=True)
class Gather:
    """An all_gather of a slice that was copied in.

    Attributes:
        start: the all_gather.
        copy_in: what wrote the slice, into which `buffer`.
        buffer: the storage of the buffer.
    """

    start: fx.Node
    copy_in: fx.Node
    buffer: int


class ReinplaceFsdpAllGather(Pass):
    """all_gather_copy_in → all_gather_into_tensor becomes all_gather_into_tensor_out into the buffer of the copy-in.

    The result then shares storage with the buffer. So nothing but this all_gather may use the buffer once the shards have
    been copied in (a second copy-in would overwrite what has been gathered); it must not be an input or an attribute, whose
    contents the caller sees; it must have the layout of the result; and the slice must lie at this rank's place of it. Saves
    one buffer per layer.
    """

    name: ClassVar[str] = "reinplace_fsdp_all_gather"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, collective_order=True)
    PATTERNS: ClassVar[tuple[str, ...]] = ("all_gather",)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """See `Pass.rewrite`. Linear in the graph."""
        if is_lowered(graph):
            return ()
        changed = []
        for gather in _gathers(graph, self.is_alone):
            into = self.buffer_node(gather)
            gather.start.target = resolve(GATHER_OUT)
            gather.start.kwargs = {**gather.start.kwargs, "out": into}
            changed.append(gather.start)
        self.rewrites["all_gather"] = len(changed)
        if changed:
            annotate_aliases(graph, changed)
        return ()

    def is_alone(self, gather: Gather, users: list[fx.Node], place: dict[fx.Node, int]) -> bool:
        """Whether only the all_gather uses the buffer after the copy-in, and it is not visible to the caller."""
        return _alone(gather, users, place)

    def buffer_node(self, gather: Gather) -> fx.Node:
        """The node of the buffer after the copy-in."""
        return _buffer_node(gather)


def _gathers(graph: fx.Graph, is_alone: Callable[[Gather, list[fx.Node], dict[fx.Node, int]], bool]) -> list[Gather]:
    """The all_gathers that may write into their buffer."""
    candidates = []
    found = accesses(graph)
    for node in graph.nodes:
        if op_name(node) != GATHER:
            continue
        copy_in = find_copy_in(named_arguments(node).get("input"))
        if copy_in is None or len(found.writes[copy_in]) != 1 or not _fits(node, copy_in):
            continue
        if not _at_own_place(node, copy_in):
            continue
        candidates.append(Gather(node, copy_in, found.writes[copy_in][0]))
    wanted = {gather.buffer for gather in candidates}
    place: dict[fx.Node, int] = {}
    users: dict[int, list[fx.Node]] = {buffer: [] for buffer in wanted}
    for number, node in enumerate(graph.nodes):
        place[node] = number
        if node.op == "output":
            touched = {s for operand in node.all_input_nodes for s in found.results[operand]}
        else:
            touched = {*found.reads[node], *found.writes[node], *found.results[node]}
        for buffer in touched & wanted:
            users[buffer].append(node)
    return [gather for gather in candidates if is_alone(gather, users[gather.buffer], place)]


def _fits(start: fx.Node, copy_in: fx.Node) -> bool:
    """Whether the buffer has the shape, strides and dtype of what is gathered."""
    buffer, result = known_spec(named_arguments(copy_in)["all_gather_output"]), known_spec(start)
    return buffer is not None and result is not None and buffer.layout == result.layout


def _at_own_place(start: fx.Node, copy_in: fx.Node) -> bool:
    """Whether the slice lies where the all_gather writes this rank's part, as far as the module gives rank and groups.

    Otherwise, data from another rank would overwrite the slice before it has been sent.
    """
    meta = getattr(start.graph.owning_module, "meta", {})
    ranks, rank = (meta.get("groups") or {}).get(named_arguments(start).get("group_name")), meta.get("rank")
    place = named_arguments(copy_in).get("rank")
    if ranks is None or rank is None or type(place) is not int:
        return True
    return place < len(ranks) and ranks[place] == rank


def _alone(gather: Gather, users: list[fx.Node], place: dict[fx.Node, int]) -> bool:
    for node in users:
        if node.op in ("placeholder", "get_attr", "output"):
            return False
        if place[node] <= place[gather.copy_in] or node is gather.start:
            continue
        if not (op_name(node) == "python::getitem" and node.args[0] is gather.copy_in):
            return False
    return True


def _buffer_node(gather: Gather) -> fx.Node:
    """The node of the buffer after the copy-in: an existing one, or a new one."""
    slice_node = named_arguments(gather.start)["input"]
    for user in gather.copy_in.users:
        if op_name(user) == "python::getitem" and user.args[1] in (1, -1):
            if user is not slice_node.next:  # may stand behind the all_gather
                slice_node.append(user)
            return user
    with gather.start.graph.inserting_after(slice_node):
        made = gather.start.graph.call_function(slice_node.target, (gather.copy_in, 1))
    infer_metadata(made)
    return made


__all__ = ["ReinplaceFsdpAllGather"]
