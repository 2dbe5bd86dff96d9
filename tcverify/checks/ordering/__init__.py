"""Checks of the order of nodes: asynchronous collectives, accesses to memory, and calls of collectives."""
