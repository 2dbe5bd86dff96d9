"""What ops mean: dialect tables by qualified name, collectives, shape inference. Nothing above knows dialects."""

from tcverify.ops.aliasing import (
    AliasedArgument,
    aliased,
    aliased_arguments,
    aliased_operands,
    mutated,
    mutated_operands,
)
from tcverify.ops.collective import Collective, Group, complete, mismatch, reduce_contributions
from tcverify.ops.dialects import (  # noqa: F401 - the modules register dialects
    bucketing,
    c10d_functional,
    c10d_point_to_point,
    dtensor,
    host_ir,
    multidevice,
    p2p,
    symmetric_memory,
)
from tcverify.ops.dialects.aten import drop_device, is_allocation
from tcverify.ops.dialects.fsdp import RESIZE  # the module registers the fsdp dialect
from tcverify.ops.dialects.host_ir import DEALLOCATE
from tcverify.ops.dialects.tensor_cast.library import (  # the module registers the tensor_cast dialect
    RECORD,
    WAIT,
    late_definition,
)
from tcverify.ops.equivalent_arguments import OPEN_END, equivalent_arguments
from tcverify.ops.inference import infer
from tcverify.ops.layout import DeviceMesh, Layout
from tcverify.ops.nested import run_by_meaning
from tcverify.ops.op import Await, Op, Request, Start
from tcverify.ops.reductions import REDUCTIONS
from tcverify.ops.resharding import Resharding
from tcverify.ops.shapes import ShapeError, fake_tensor, new_fake_mode, with_group
from tcverify.ops.signature import gives_more
from tcverify.ops.spec import TensorSpec, merged_runs
from tcverify.ops.table import (
    current_overload,
    define_ops,
    lookup,
    qualified_name,
    register_dialect,
    registered_dialects,
    resolve,
    schema_of,
)

__all__ = [
    "DEALLOCATE",
    "OPEN_END",
    "RECORD",
    "REDUCTIONS",
    "RESIZE",
    "WAIT",
    "AliasedArgument",
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
    "aliased",
    "aliased_arguments",
    "aliased_operands",
    "complete",
    "current_overload",
    "define_ops",
    "drop_device",
    "equivalent_arguments",
    "fake_tensor",
    "gives_more",
    "infer",
    "is_allocation",
    "late_definition",
    "lookup",
    "merged_runs",
    "mismatch",
    "mutated",
    "mutated_operands",
    "new_fake_mode",
    "qualified_name",
    "reduce_contributions",
    "register_dialect",
    "registered_dialects",
    "resolve",
    "run_by_meaning",
    "schema_of",
    "with_group",
]
