"""Starts the processes that tcverify works with, and ends them with all that they leave. Importing it imports no torch."""

from tcverify.processes.starting import (
    LAZY_MODULES,
    die_with_parent,
    end_process,
    forkserver,
    interrupts_kept_off,
    limit,
    limit_memory,
    log_to,
    main_hidden,
    resident_bytes,
    start_process,
    start_server,
)

__all__ = [
    "LAZY_MODULES",
    "die_with_parent",
    "end_process",
    "forkserver",
    "interrupts_kept_off",
    "limit",
    "limit_memory",
    "log_to",
    "main_hidden",
    "resident_bytes",
    "start_process",
    "start_server",
]
