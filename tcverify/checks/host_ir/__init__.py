"""Checks of host IR: what hosts give to streams, and what they wait for."""
