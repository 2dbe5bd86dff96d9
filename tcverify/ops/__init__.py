"""What ops mean: dialect tables by qualified name, collectives, shape inference. Nothing above knows dialects."""

from tcverify.ops import tensor_cast as _tensor_cast  # registers the dialect
from tcverify.ops.collective import Collective, complete, mismatch
from tcverify.ops.shapes import ShapeError, fake_tensor, infer, new_fake_mode
from tcverify.ops.spec import TensorSpec, ValueSpec
from tcverify.ops.table import Op, Request, lookup, qualified_name, register_dialect, resolve

__all__ = [
    "Collective",
    "Op",
    "Request",
    "ShapeError",
    "TensorSpec",
    "ValueSpec",
    "complete",
    "fake_tensor",
    "infer",
    "lookup",
    "mismatch",
    "new_fake_mode",
    "qualified_name",
    "register_dialect",
    "resolve",
]

del _tensor_cast
