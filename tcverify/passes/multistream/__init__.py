"""Multistream scheduling: collectives run beside compute, on streams of their own."""

from tcverify.passes.multistream.multistream import Multistream

__all__ = ["Multistream"]
