"""tcverify: does this compiler pass preserve the meaning of a distributed program?

The names below are imported on first use: every run of pytest imports the pytest plugin, which must cost nothing
where it is not used. `verifies` needs pytest; `run` and `register_strategy` need Hypothesis. `import *` leaves these three
out.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

# torch says this once per process when NumPy is not installed; tcverify does not use NumPy.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)

if TYPE_CHECKING:
    from tcverify.application import Guarded
    from tcverify.capturing import Captured, capture, program_of
    from tcverify.checks import Evidence, register_check, register_evidence
    from tcverify.cli.python import run as run
    from tcverify.cli.running import RunResult as RunResult
    from tcverify.compile_check import annotate, checked, checked_backend
    from tcverify.errors import TcverifyError, Unsupported
    from tcverify.execution import Executor, Lockstep, ProcessGroupPool, register_executor
    from tcverify.ops import DeviceMesh, Layout, Op, register_dialect
    from tcverify.program import (
        PARTIAL,
        REPLICATED,
        VARYING,
        Contract,
        Finding,
        GraphBuilder,
        InputSpec,
        Mesh,
        Placed,
        PlacedBuilder,
        Placement,
        Program,
        Recipe,
        dumps,
        loads,
        rewrite,
        shard,
        spmd_program,
    )
    from tcverify.pytest_plugin import verifies as verifies
    from tcverify.registry.extensions import load_extension
    from tcverify.registry.op_laws import declare_op_law
    from tcverify.strategies import register_strategy as register_strategy
    from tcverify.verification.exceptions import Refuted
    from tcverify.verification.verifier import Verdict, verify

__version__ = "0.1.0"

__all__ = [
    "PARTIAL",
    "REPLICATED",
    "VARYING",
    "Captured",
    "Contract",
    "DeviceMesh",
    "Evidence",
    "Executor",
    "Finding",
    "GraphBuilder",
    "Guarded",
    "InputSpec",
    "Layout",
    "Lockstep",
    "Mesh",
    "Op",
    "Placed",
    "PlacedBuilder",
    "Placement",
    "ProcessGroupPool",
    "Program",
    "Recipe",
    "Refuted",
    "TcverifyError",
    "Unsupported",
    "Verdict",
    "annotate",
    "capture",
    "checked",
    "checked_backend",
    "declare_op_law",
    "dumps",
    "load_extension",
    "loads",
    "program_of",
    "register_check",
    "register_dialect",
    "register_evidence",
    "register_executor",
    "rewrite",
    "shard",
    "spmd_program",
    "verify",
]

#: Home module of each name that does not come from `tcverify.program`.
_HOMES = {
    "Evidence": "checks",
    "Guarded": "application",
    "TcverifyError": "errors",
    "Unsupported": "errors",
    "Captured": "capturing",
    "capture": "capturing",
    "program_of": "capturing",
    "Executor": "execution",
    "Lockstep": "execution",
    "ProcessGroupPool": "execution",
    "DeviceMesh": "ops",
    "Layout": "ops",
    "Op": "ops",
    "declare_op_law": "registry.op_laws",
    "load_extension": "registry.extensions",
    "register_check": "checks",
    "register_evidence": "checks",
    "register_dialect": "ops",
    "register_executor": "execution",
    "register_strategy": "strategies",
    "Refuted": "verification.exceptions",
    "RunResult": "cli.running",
    "run": "cli.python",
    "checked": "compile_check",
    "checked_backend": "compile_check",
    "annotate": "compile_check",
    "verifies": "pytest_plugin",
    "Verdict": "verification.verifier",
    "verify": "verification.verifier",
}


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _HOMES:
        raise AttributeError(f"module 'tcverify' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"tcverify.{_HOMES.get(name, 'program')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES})
