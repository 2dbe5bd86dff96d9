"""tcverify: does this compiler pass keep the meaning of a distributed program?"""

import warnings

# torch says this once per process when NumPy is not installed; tcverify does not use NumPy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)

from tcverify.application import Guarded
from tcverify.errors import TcverifyError, Unsupported
from tcverify.execution import Lockstep, ProcessGroupPool
from tcverify.ops import Op, register_dialect
from tcverify.program import (
    PARTIAL,
    REPLICATED,
    VARYING,
    Contract,
    Finding,
    GraphBuilder,
    InputSpec,
    Mesh,
    Placement,
    Program,
    Recipe,
    dumps,
    loads,
    shard,
    spmd_program,
)
from tcverify.verifier import Verdict, verify

__version__ = "0.1.0"

__all__ = [
    "PARTIAL",
    "REPLICATED",
    "VARYING",
    "Contract",
    "Finding",
    "GraphBuilder",
    "Guarded",
    "InputSpec",
    "Lockstep",
    "Mesh",
    "Op",
    "Placement",
    "ProcessGroupPool",
    "Program",
    "Recipe",
    "TcverifyError",
    "Unsupported",
    "Verdict",
    "dumps",
    "loads",
    "register_dialect",
    "shard",
    "spmd_program",
    "verify",
]
