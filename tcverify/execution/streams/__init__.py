"""Streams of lowered programs, in every order in which they may run: simulated, and on CUDA devices."""
