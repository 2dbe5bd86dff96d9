"""Counterexamples as files: what they hold, which findings are the same, and which are known."""
