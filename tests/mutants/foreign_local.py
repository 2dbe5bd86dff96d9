"""Small passes of the kind that engineers write, each sound, and each with one defect put back: ops of one rank, and storage."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import ClassVar

from torch import fx

from tcverify.ops import lookup, resolve
from tcverify.passes.editing import infer_metadata, known_spec, named_arguments, op_name
from tcverify.program import Contract
from tests.mutants.foreign import ADD, MUL, Foreign, shape, writes, written

RMS_NORM, ADD_RMS_NORM, ADD_RMS_NORM2, LAYER_NORM = (
    f"tensor_cast::{name}" for name in ("rms_norm", "add_rms_norm", "add_rms_norm2", "layer_norm")
)
WAIT, RECORD = "tensor_cast::_internal_wait_and_bind", "tensor_cast::_internal_record"


# ------------------------------------------------------------------------------------------------------- fused and split


class FuseNorm(Foreign):
    """x + y → rms_norm ⇒ add_rms_norm(x, y)"""

    def fits(self, total: fx.Node) -> bool:
        """Whether a sum can go into the norm."""
        return not total.kwargs

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) != RMS_NORM:
            return
        total, weight, eps = node.args
        if not isinstance(total, fx.Node) or op_name(total) != ADD or len(total.users) > 1 or not self.fits(total):
            return
        x, y = total.args
        if shape(x) == shape(y) == shape(total) and x.meta["val"].dtype == y.meta["val"].dtype:  # type: ignore[union-attr]
            self.replace(node, self.put(node, ADD_RMS_NORM, x, y, weight, self.eps(float(eps))))  # type: ignore[arg-type]

    def eps(self, eps: float) -> float:
        """The eps of the fused norm."""
        return eps


class AlphaDropped(FuseNorm):
    """`alpha`, by which the sum multiplies its second addend, does not come along into the fused op (wrong-value)."""

    def fits(self, total: fx.Node) -> bool:
        return True


class DefaultEps(FuseNorm):
    """The fused norm has the eps that norms usually have, not the one that it was given (wrong-value)."""

    def eps(self, eps: float) -> float:
        return 1e-6


class SplitNorm(Foreign):
    """add_rms_norm2(x, y) ⇒ the sum, and the norm of it"""

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) != "python::getitem" or op_name(node.args[0]) != ADD_RMS_NORM2:  # type: ignore[arg-type]
            return
        both, index = node.args
        x, y, weight, eps = both.args  # type: ignore[union-attr]
        if (
            type(index) is not int
            or not -2 <= index < 2
            or shape(x) != shape(y)
            or x.meta["val"].dtype != y.meta["val"].dtype
        ):  # type: ignore[union-attr]
            return
        total = self.put(node, ADD, x, y)
        if self.is_norm(index):
            total = self.put(node, RMS_NORM, total, weight, eps)
        self.replace(node, total)

    def is_norm(self, index: int) -> bool:
        """Whether this result of the fused op is the norm."""
        return index % 2 == 0


class ResultsSwapped(SplitNorm):
    """The sum and its norm change places: both have the same shape (wrong-value)."""

    def is_norm(self, index: int) -> bool:
        return index % 2 == 1


class SplitLayerNorm(Foreign):
    """layer_norm ⇒ mean, variance and what follows from them"""

    correction: ClassVar[int] = 0

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) != LAYER_NORM:
            return
        x, weight, bias, eps = named_arguments(node).values()
        mean = self.put(node, "aten::mean.dim", x, [-1], True)
        variance = self.put(node, "aten::var.correction", x, [-1], correction=self.correction, keepdim=True)
        scale = self.put(node, "aten::rsqrt", self.put(node, ADD, variance, eps))
        normed = self.put(node, MUL, self.put(node, "aten::sub.Tensor", x, mean), scale)
        for op, operand in ((MUL, weight), (ADD, bias)):
            if operand is not None:
                normed = self.put(node, op, normed, operand)
        if normed.meta["val"].dtype == node.meta["val"].dtype:
            self.replace(node, normed)


class VarianceOfSample(SplitLayerNorm):
    """The variance divides by one less than the number of elements, which is what `var` does unless told (wrong-value)."""

    correction = 1


# ------------------------------------------------------------------------------------------------------ values and storage


class MergeEqualCalls(Foreign):
    """Two calls of one op with equal arguments ⇒ one, where nothing writes into what they read, and neither is returned."""

    def begin(self, graph: fx.Graph) -> None:
        self.known: dict[Hashable, fx.Node] = {}
        self.kept = written(graph)

    def allows(self, node: fx.Node) -> bool:
        return not self.kept and all(user.op != "output" for user in node.users)

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        op = lookup(node.target)
        if op.run is None or op.collective or op.aliases or not self.allows(node):
            return
        key = (node.target, repr(node.args), repr(node.kwargs))  # nodes show their names
        first = self.known.setdefault(key, node)
        if first is not node:
            self.replace(node, first)


class MergedAcrossWrite(MergeEqualCalls):
    """What was read before a write is taken for what is read behind it (wrong-value)."""

    def allows(self, node: fx.Node) -> bool:
        return not writes(node) and all(user.op != "output" for user in node.users)


class ReturnedAsOne(MergeEqualCalls):
    """Two results that the program returns become one tensor: who writes into the one changes the other (wrong-alias)."""

    def allows(self, node: fx.Node) -> bool:
        return not self.kept


class DropCopies(Foreign):
    """clone(x) ⇒ x, where nothing writes and the copy is not returned"""

    def begin(self, graph: fx.Graph) -> None:
        self.kept = written(graph)

    def allows(self, node: fx.Node) -> bool:
        return not self.kept and all(user.op != "output" for user in node.users)

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        if op_name(node) == "aten::clone" and not node.kwargs and self.allows(node):
            (source,) = node.args
            if isinstance(source, fx.Node) and source.meta["val"].stride() == node.meta["val"].stride():
                self.replace(node, source)


class CopyDropped(DropCopies):
    """A copy goes that keeps what a later write changes in its source (wrong-value)."""

    def allows(self, node: fx.Node) -> bool:
        return all(user.op != "output" for user in node.users)


class ReuseOperand(Foreign):
    """relu(x) and x + y write into x, where x is a call's own result that nobody else reads."""

    IN_PLACE: ClassVar[dict[str, str]] = {
        "aten::relu": "aten::relu_",
        ADD: "aten::add_.Tensor",
        MUL: "aten::mul_.Tensor",
        "aten::neg": "aten::neg_",
    }

    def free(self, value: fx.Node, node: fx.Node) -> bool:
        """Whether the tensor of `value` may be written into at `node`."""
        return value.op == "call_function" and len(value.users) == 1 and not lookup(value.target).aliases

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        op = self.IN_PLACE.get(op_name(node))
        value = node.args[0] if node.args else None
        if op is None or node.kwargs or not isinstance(value, fx.Node) or any(arg is value for arg in node.args[1:]):
            return
        old, new = value.meta.get("val"), node.meta["val"]
        if (old.shape, old.dtype, old.stride()) == (new.shape, new.dtype, new.stride()) and self.free(value, node):
            node.target = resolve(op)
            infer_metadata(node)


class WrittenWhileRead(ReuseOperand):
    """Other readers of the operand are not looked for: they find what was written (wrong-value, …)."""

    def free(self, value: fx.Node, node: fx.Node) -> bool:
        return value.op == "call_function" and not lookup(value.target).aliases


class InputOverwritten(ReuseOperand):
    """An input of the program is taken for a tensor of its own, and the caller's is overwritten (wrong-value)."""

    def free(self, value: fx.Node, node: fx.Node) -> bool:
        return len(value.users) == 1 and (value.op == "placeholder" or super().free(value, node))


# --------------------------------------------------------------------------------------------------- the pass as a program


class NameRegions(Foreign):
    """Puts a marker in front of every norm, with the number of the norm in the graph."""

    def begin(self, graph: fx.Graph) -> None:
        self.numbers = itertools.count(100)

    def visit(self, graph: fx.Graph, node: fx.Node) -> None:
        marked = "tensor_cast::_internal_mark_region_begin"
        if op_name(node) == RMS_NORM and op_name(node.args[0]) != marked:  # type: ignore[arg-type]
            node.update_arg(0, self.put(node, marked, node.args[0], next(self.numbers)))
            infer_metadata(node)


_NUMBERS = itertools.count(100)


class NumberedByProcess(NameRegions):
    """Markers are numbered by a counter of the process: no two compilations of a model agree, and no two ranks (impure-pass)."""

    def begin(self, graph: fx.Graph) -> None:
        self.numbers = _NUMBERS


class Rebuild(Foreign):
    """Copies the graph call by call, without markers."""

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph, made = fx.Graph(), {}
        for node in gm.graph.nodes:
            if op_name(node) == "tensor_cast::_internal_mark_region_begin":
                self.skip(made, node)
            else:
                made[node] = graph.node_copy(node, lambda operand: made.get(operand, operand))
        return fx.GraphModule(gm, graph)

    def skip(self, made: dict[fx.Node, fx.Node], node: fx.Node) -> None:
        """What reads a marker is to read what is marked."""
        made[node] = made[node.args[0]]  # type: ignore[index]


class StrayNode(Rebuild):
    """Readers of a call that was left out still read it, in the graph that was left behind (malformed-graph)."""

    def skip(self, made: dict[fx.Node, fx.Node], node: fx.Node) -> None:
        pass


# ----------------------------------------------------------------------------------------------------------------- streams


class SideStream(Foreign):
    """Every collective runs on stream 1: it waits for what made its operand, and what reads its result waits for it.

    Inputs are written on stream 0 by the caller, so they are waited for like anything else. Graphs with views and tuples around
    their collectives are left alone.
    """

    contract: ClassVar[Contract] = Contract(inputs="stream0")

    def waits(self, operand: fx.Node) -> bool:
        """Whether the collective waits for what made its operand."""
        return True

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph = gm.graph
        calls = [node for node in graph.nodes if node.op == "call_function" and lookup(node.target).collective]
        near = [
            other for node in calls for other in (*node.all_input_nodes, *node.users) if other.op == "call_function"
        ]
        lowered = any(op_name(node) == WAIT for node in graph.nodes)
        if lowered or written(graph) or any(lookup(node.target).aliases or known_spec(node) is None for node in near):
            return gm
        self.records: dict[fx.Node, fx.Node] = {}
        for node in calls:
            operand, *others = node.all_input_nodes
            tokens = [self.record(made, calls) for made in (operand, *others) if self.waits(made)]
            node.replace_input_with(operand, self.put(node, WAIT, operand, 1, tokens))
        for node in calls:
            for reader in [user for user in node.users if op_name(user) not in (WAIT, RECORD)]:
                if reader not in calls:
                    reader.replace_input_with(node, self.put(reader, WAIT, node, 0, [self.record(node, calls)]))
        gm.recompile()
        return gm

    def record(self, made: fx.Node, calls: list[fx.Node]) -> fx.Node:
        """The token of a value: behind the call that made it, or for an input in front of all calls."""
        if made not in self.records:
            behind = made
            while behind.op == "placeholder" and behind.next.op == "placeholder":
                behind = behind.next
            self.records[made] = self.put(behind.next, RECORD, made, 1 if made in calls else 0)
        return self.records[made]


class CallerNotWaitedFor(SideStream):
    """A collective does not wait for inputs, which the caller may still be writing on stream 0 (race)."""

    def waits(self, operand: fx.Node) -> bool:
        return operand.op != "placeholder"
