"""Providers of evidence, one file each. A kind is collected when a check first asks for it."""
