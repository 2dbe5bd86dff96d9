"""Providers of evidence: how each kind is taken, when a check first asks for it. A file each."""
