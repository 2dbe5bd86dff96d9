"""Checks of lowered graphs: streams, what they wait for, races, and schedules."""
