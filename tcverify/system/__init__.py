"""Starts the processes of tcverify, and ends them and cleans up after them. Importing it does not import torch."""

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
