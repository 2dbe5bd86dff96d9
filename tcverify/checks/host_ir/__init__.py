"""Checks of host IR: what hosts issue to streams, and what they wait for."""
