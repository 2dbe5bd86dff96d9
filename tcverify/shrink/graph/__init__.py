"""Moves that make the graphs of a program smaller."""
