"""Typed random graphs without the structure of a model."""
