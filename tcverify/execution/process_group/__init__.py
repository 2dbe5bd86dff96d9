"""Ranks as processes, on a real process group."""
