"""Starts the processes that tcverify works with, and ends them with all that they leave. Importing it imports no torch."""

from tcverify.system.processes import (
    LAZY_MODULES,
    end_process,
    limit_blocking,
    limit_memory,
    log_to,
    machine_memory,
    resident_bytes,
    start_process,
    start_server,
)

__all__ = [
    "LAZY_MODULES",
    "end_process",
    "limit_blocking",
    "limit_memory",
    "log_to",
    "machine_memory",
    "resident_bytes",
    "start_process",
    "start_server",
]
