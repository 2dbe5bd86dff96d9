"""What ops mean: dialect tables by qualified name, collectives, shape inference. Nothing above knows dialects."""

from tcverify.ops.collective import Collective, complete, mismatch
from tcverify.ops.library import RECORD, WAIT, late_definition  # the module registers the tensor_cast dialect
from tcverify.ops.nested import by_meaning
from tcverify.ops.shapes import ShapeError, fake_tensor, infer, new_fake_mode
from tcverify.ops.signature import gives_more
from tcverify.ops.spec import TensorSpec, ValueSpec
from tcverify.ops.table import Op, Request, current, define_ops, lookup, qualified_name, register_dialect, resolve

__all__ = [
    "RECORD",
    "WAIT",
    "Collective",
    "Op",
    "Request",
    "ShapeError",
    "TensorSpec",
    "ValueSpec",
    "by_meaning",
    "complete",
    "current",
    "define_ops",
    "fake_tensor",
    "gives_more",
    "infer",
    "late_definition",
    "lookup",
    "mismatch",
    "new_fake_mode",
    "qualified_name",
    "register_dialect",
    "resolve",
]
