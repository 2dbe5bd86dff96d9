"""What ops mean: dialect tables by qualified name, collectives, shape inference. Nothing above knows dialects."""

from tcverify.ops import (  # the modules register dialects
    bucketing,
    dtensor,
    functional,
    host_ir,
    multidevice,
    opaque,
    point_to_point,
    symmetric,
)
from tcverify.ops.aten import any_device, is_allocation
from tcverify.ops.collective import Collective, Group, complete, mismatch, reduced
from tcverify.ops.fsdp import RESIZE  # the module registers the fsdp dialect
from tcverify.ops.host_ir import DEALLOCATE
from tcverify.ops.layout import DeviceMesh, Layout
from tcverify.ops.library import RECORD, WAIT, late_definition  # the module registers the tensor_cast dialect
from tcverify.ops.nested import by_meaning
from tcverify.ops.reductions import REDUCTIONS
from tcverify.ops.resharding import Resharding
from tcverify.ops.shapes import ShapeError, fake_tensor, infer, new_fake_mode
from tcverify.ops.signature import gives_more
from tcverify.ops.spec import TensorSpec, ValueSpec, merged_runs
from tcverify.ops.table import (
    Await,
    Op,
    Request,
    Start,
    current,
    define_ops,
    dialects,
    lookup,
    qualified_name,
    register_dialect,
    resolve,
    schema_of,
)

__all__ = [
    "DEALLOCATE",
    "RECORD",
    "REDUCTIONS",
    "RESIZE",
    "WAIT",
    "Await",
    "Collective",
    "DeviceMesh",
    "Group",
    "Layout",
    "Op",
    "Request",
    "Resharding",
    "ShapeError",
    "Start",
    "TensorSpec",
    "ValueSpec",
    "any_device",
    "bucketing",
    "by_meaning",
    "complete",
    "current",
    "define_ops",
    "dialects",
    "dtensor",
    "fake_tensor",
    "functional",
    "gives_more",
    "host_ir",
    "infer",
    "is_allocation",
    "late_definition",
    "lookup",
    "merged_runs",
    "mismatch",
    "multidevice",
    "new_fake_mode",
    "opaque",
    "point_to_point",
    "qualified_name",
    "reduced",
    "register_dialect",
    "resolve",
    "schema_of",
    "symmetric",
]
