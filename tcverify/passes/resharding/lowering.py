"""The pass `convert_op_to_communication`: every `set` and `reduce` becomes local ops, communications and waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import fx

from tcverify.errors import Unsupported
from tcverify.ops import Resharding
from tcverify.passes.base import Pass
from tcverify.passes.editing import known_spec, named_arguments
from tcverify.passes.resharding.decisions import BITWISE, PostedCommunication, ReshardingPlan, plan_resharding
from tcverify.passes.resharding.layouts import resharding_of
from tcverify.passes.resharding.writing import HostWriter
from tcverify.program import Contract

#: Of two values, by reduction; where no op reduces a whole dim, it is applied one after the other.
_PAIRWISE = {
    "sum": "aten::add.Tensor",
    "product": "aten::mul.Tensor",
    "min": "aten::minimum",
    "max": "aten::maximum",
    "band": "aten::bitwise_and.Tensor",
    "bor": "aten::bitwise_or.Tensor",
    "bxor": "aten::bitwise_xor.Tensor",
}


class ConvertOpToCommunication(Pass):
    """Lowers changes of layout to communications, each waited for at once.

    Every rank does its part of what `decisions.plan_resharding` says: it allocates the output if it gets something, makes the
    operand contiguous, posts and waits. A rank that takes no part does nothing. Stream axes of local ops stay: loops over them
    are another pass's.
    """

    name = "convert_op_to_communication"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, inputs="stream0")
    PATTERNS: ClassVar[tuple[str, ...]] = (
        "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast", "gather", "scatter", "reduce", "send", "recv",
        "local", "idle",
    )  # fmt: skip

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Lower every `set` and `reduce`.

        Raises:
            Unsupported: one of them cannot be lowered; the message names it.
        """
        asked = self.asked(graph)
        plans = [self._plan(node, made) for node, made in asked]  # all of them, before anything is changed
        writer = HostWriter(graph)
        displaced: list[fx.Node] = []
        for (node, made), decided in zip(asked, plans, strict=True):
            kinds: list[str] = [c.kind for c in decided.communications]
            for kind in kinds or ["idle" if decided.part is None else "local"]:
                self.rewrites[kind] += 1
            with writer.before(node):
                result = self.writing(writer, made, decided, named_arguments(node)).write()
                if node.users:
                    # A rank that receives nothing has a value without elements, in case that it is referenced.
                    result = result if result is not None else writer.allocate([0], named_arguments(node)["dtype"])
                    result.meta["layout"] = str(made.target)
                    node.replace_all_uses_with(result)
            displaced += node.all_input_nodes
            graph.erase_node(node)
        return displaced

    def asked(self, graph: fx.Graph) -> list[tuple[fx.Node, Resharding]]:
        """The nodes to lower, and what they ask for."""
        return [(node, made) for node in graph.nodes if (made := resharding_of(node)) is not None]

    def decide(self, made: Resharding, rank: int, dtype: torch.dtype) -> ReshardingPlan:
        """What a rank does for a resharding. See `decisions.plan_resharding`."""
        return plan_resharding(made, rank, dtype)

    def writing(
        self, writer: HostWriter, made: Resharding, decided: ReshardingPlan, given: dict[str, Any]
    ) -> PlanWriter:
        """What writes that, for an op with these arguments."""
        return PlanWriter(writer, made, decided, given)

    def _plan(self, node: fx.Node, made: Resharding) -> ReshardingPlan:
        given = named_arguments(node)
        x = given["x"]
        if x is not None and known_spec(x) is None:
            raise Unsupported(
                f"'{node.name}': the metadata of its operand '{x.name}' has no shape of known sizes",
                "propagate shapes through the graph before the pass",
            )
        try:
            return self.decide(made, given["rank"], given["dtype"])
        except Unsupported as error:
            raise Unsupported(f"'{node.name}': {error.message}", error.hint) from None


@dataclass(frozen=True, slots=True)
class PlanWriter:
    """Writes what a plan says for one `set` or `reduce`.

    Attributes:
        given: arguments of the op.
    """

    writer: HostWriter
    made: Resharding
    plan: ReshardingPlan
    given: dict[str, Any]

    def write(self) -> fx.Node | None:
        """Returns the rank's part of the result, or None where it gets nothing."""
        x, made = self.given["x"], self.made
        communications = self.plan.communications
        if made.dim is not None and x is not None and (communications or self.plan.part is not None):
            x = self._reduced(x, made.dim)
        result = None
        if self.plan.part is not None:
            result = self._part(x, self.plan.part)
        for communication in communications:
            if x is not None and communication.kind == "all_to_all":
                result = self._all_to_all(x, communication)
                continue
            if x is not None and communication.gives:
                x = self._contiguous(x)
            out = self._post(x, communication)
            result = out if out is not None else result
        if self.plan.divisor != 1:
            result = self.writer.call("aten::div.Scalar", result, self.plan.divisor)
        return result

    # ------------------------------------------------------------------------------------------------------ local steps

    def _reduced(self, x: fx.Node, dim: int) -> fx.Node:
        """What the rank has of a sharded dim, reduced to an extent of 1."""
        call, op, dtype = self.writer.call, self.made.reduce_op or "", self.given["dtype"]
        extent = _shape(x)[dim]
        if extent == 1:
            return x
        if op in BITWISE or dtype is torch.bool:
            parts = [call("aten::slice.Tensor", x, dim, at, at + 1) for at in range(extent)]
            return reduce(lambda a, b: call(_PAIRWISE[op], a, b), parts)
        if op == "sum":
            return call("aten::sum.dim_IntList", x, [dim], True, dtype=dtype)
        if op == "avg":
            return call("aten::mean.dim", x, [dim], True)
        if op == "product":
            return call("aten::prod.dim_int", x, dim, True, dtype=dtype)
        return call("aten::amax" if op == "max" else "aten::amin", x, [dim], True)

    def _part(self, x: fx.Node, part: Sequence[tuple[int, int]]) -> fx.Node:
        """A part of the rank's value: contiguous, and not shared."""
        call = self.writer.call
        if self.made.dim is not None:
            x = call("aten::select.int", x, self.made.dim, 0)
        for dim, (start, stop) in enumerate(part):
            if (start, stop) != (0, _shape(x)[dim]):
                x = call("aten::slice.Tensor", x, dim, start, stop)
        return self._copy(x)

    def _contiguous(self, x: fx.Node) -> fx.Node:
        return x if x.meta["val"].is_contiguous() else self._copy(x)

    def _copy(self, x: fx.Node) -> fx.Node:
        return self.writer.call("aten::clone", x, memory_format=torch.contiguous_format)

    def _identity(self) -> fx.Node:
        """What changes nothing when it is reduced too."""
        dtype, made = self.given["dtype"], self.made
        shape = list(made.shape)
        shape[made.dim or 0] = 1
        return self.writer.call("aten::full", shape, identity(made.reduce_op or "", dtype), dtype=dtype)

    # --------------------------------------------------------------------------------------------------- communications

    def _post(self, x: fx.Node | None, found: PostedCommunication) -> fx.Node | None:
        """Post one communication and wait for it. Returns the output, if this rank has one."""
        made, writer = self.made, self.writer
        if found.kind == "reduce" and not found.gives:
            x = self._identity()
        out = view = None
        if found.gets:
            out = view = writer.allocate(made.target.local_shape(made.result_shape), self.given["dtype"])
            if made.dim is not None:  # operand and output of a reduction have the same dims
                view = writer.call("aten::unsqueeze", out, made.dim)
        posted_x = x if found.gives or found.kind == "reduce" else None
        if found.kind == "send":
            writer.communicate("send", x, found.team[1])
        elif found.kind == "recv":
            writer.communicate("recv", out, found.team[0])
        else:
            values = (found.axis, found.reduce_op, found.root, list(found.team))
            writer.communicate(found.kind, posted_x, *(value for value in values if value is not None), out=view)
        return out

    def _all_to_all(self, x: fx.Node, found: PostedCommunication) -> fx.Node:
        """Chunks of the dim that is divided go to the others, and their shards of the other dim come together."""
        call, members = self.writer.call, len(found.team)
        gathered, split = found.axis or 0, found.split or 0
        shape = list(_shape(x))
        shape[split] //= members
        # pack: chunk j of the dim is block j
        blocks = call("aten::view", x, [*shape[:split], members, *shape[split:]])
        order = [split, *(dim for dim in range(len(shape) + 1) if dim != split)]
        packed = self._contiguous(call("aten::permute", blocks, order))
        out = self.writer.allocate([members, *shape], self.given["dtype"])
        self.writer.communicate("all_to_all", packed, list(found.team), out=out)
        # unpack: block i is shard i of the other dim
        order = [*range(1, gathered + 1), 0, *range(gathered + 1, len(shape) + 1)]
        unpacked = self._contiguous(call("aten::permute", out, order))
        shape[gathered] *= members
        return call("aten::view", unpacked, shape)


def identity(reduce_op: str, dtype: torch.dtype) -> bool | int | float:
    """The value that changes nothing when it is reduced with others.

    Args:
        reduce_op: not "avg", which has none.
    """
    if dtype is torch.bool:
        return reduce_op in ("min", "product", "band")
    if reduce_op in ("min", "max"):
        if dtype.is_floating_point:
            return float("inf") if reduce_op == "min" else float("-inf")
        limits = torch.iinfo(dtype)
        return limits.max if reduce_op == "min" else limits.min
    if reduce_op == "band":
        return -1 if dtype.is_signed else torch.iinfo(dtype).max
    return 1 if reduce_op == "product" else 0


def _shape(x: fx.Node) -> Sequence[int]:
    return tuple(x.meta["val"].shape)


__all__ = ["ConvertOpToCommunication", "PlanWriter", "identity"]
