"""Verification inside a real compile: passes that are verified on the graphs that a compiler gives them."""

from tcverify.compile_check.backend import CheckedBackend, checked_backend
from tcverify.compile_check.checking import Checked, checked
from tcverify.compile_check.graph_facts import annotate
from tcverify.compile_check.tally import Tally

__all__ = ["Checked", "CheckedBackend", "Tally", "annotate", "checked", "checked_backend"]
