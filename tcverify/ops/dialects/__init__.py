"""Dialects: what the ops of a namespace compute, and the shapes of what they return."""
