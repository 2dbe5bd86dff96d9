"""Verifies one pass on one program: gathers evidence, applies checks, and returns a verdict."""
