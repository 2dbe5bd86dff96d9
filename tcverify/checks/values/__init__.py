"""Checks of values: both versions compute the same, in each number domain."""
