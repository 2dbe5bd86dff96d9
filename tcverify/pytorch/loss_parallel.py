"""The parallel loss of DTensor as a pass: cross entropy of logits whose classes are sharded, and its gradient."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx
from torch.distributed.tensor import DTensor

from tcverify.errors import Unsupported
from tcverify.ops import qualified_name
from tcverify.pytorch.dtensor import DTensorProgram
from tcverify.pytorch.end_to_end.pipeline import Pipeline

#: What is said of logits, targets and weights that are not placed as they have to be.
_MISPLACED = re.compile(r"loss_parallel\(\) (requires|expects|should|only supports)|^Expected .* but got")

_VIEWS = re.compile(r"aten::(view|reshape|_unsafe_view|(un)?squeeze)\b")
_SOFTMAX, _GRADIENT = "aten::_log_softmax", "aten::_log_softmax_backward_data"
_BACKWARDS = ("aten::nll_loss_backward", "aten::nll_loss2d_backward")


class LossParallel(DTensorProgram):
    """Runs the graph on DTensors under `loss_parallel`.

    Raises:
        Unsupported: it has parts of a cross entropy, which is computed as a whole; or tensors are not placed for it.
    """

    name = "torch:loss_parallel"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        _require_whole(gm.graph)
        return super().rewrite(gm, options)

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(unreachable="no setting brings it about")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        from torch.distributed.tensor.parallel import loss_parallel

        handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
        before = dict(handlers)
        try:
            with loss_parallel():
                yield
        except (RuntimeError, ValueError) as error:
            if _MISPLACED.search(str(error)):
                raise Unsupported(f"DTensor: {' '.join(str(error).split())[:200]}") from error
            raise
        finally:  # it stays enabled behind an exception
            handlers.clear()
            handlers.update(before)


def _require_whole(graph: fx.Graph) -> None:
    """Refuse gradients of parts of a cross entropy: the first of its two ops computes that of both.

    Raises:
        Unsupported: there is one of them alone.
    """
    for node in graph.nodes:
        name = _name(node)
        if name in _BACKWARDS:
            softmax, readers = _viewed(node.args[1]), _readers(node)
            if _name(softmax) != _SOFTMAX or not readers or any(_name(one) != _GRADIENT for one in readers):
                raise Unsupported(f"node '{node.name}' is the gradient of a part of a cross entropy")
        elif name == _GRADIENT and _name(_viewed(node.args[0])) not in _BACKWARDS:
            raise Unsupported(f"node '{node.name}' is the gradient of a log_softmax that is no part of a cross entropy")


def _name(node: Any) -> str:
    return qualified_name(node.target) if isinstance(node, fx.Node) and node.op == "call_function" else ""


def _viewed(node: Any) -> Any:
    """What a view shows."""
    while _VIEWS.match(_name(node)):
        node = node.args[0]
    return node


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a value, or views of it."""
    return [reader for user in node.users for reader in (_readers(user) if _VIEWS.match(_name(user)) else [user])]


__all__ = ["LossParallel"]
