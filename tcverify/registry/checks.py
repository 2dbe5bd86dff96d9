"""The checks by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tcverify.registry.registry import Registry

#: All checks by the name that `--checks` takes, in the order in which they run.
CHECKS: Registry[Callable[..., Any]] = Registry(
    {
        "structure": "tcverify.checks.structure:check_structure",
        "metadata": "tcverify.checks.metadata:check_metadata",
        "collectives": "tcverify.checks.collectives:check_collectives",
        "happens-before": "tcverify.checks.streams.happens_before:check_happens_before",
        "host-program": "tcverify.checks.host_ir.host_program:check_host_program",
        "order": "tcverify.checks.ordering.order:check_order",
        "memory": "tcverify.checks.memory.memory:check_memory",
        "interleavings": "tcverify.checks.streams.interleavings:check_interleavings",
        "schedule": "tcverify.checks.streams.schedule:check_schedule",
        "equivalence": "tcverify.checks.values.equivalence:check_equivalence",
        "purity": "tcverify.checks.purity:check_purity",
    }
)

__all__ = ["CHECKS"]
