"""Multistream scheduling: collectives overlap with compute, on separate streams."""

from tcverify.passes.multistream.multistream import Multistream

__all__ = ["Multistream"]
