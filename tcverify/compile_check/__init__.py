"""Verification inside a real compile: passes that are verified on the graphs that a compiler gives them."""

from tcverify.compile_check.backend import CheckedBackend, checked_backend
from tcverify.compile_check.checking import CheckedPass, checked
from tcverify.compile_check.graph_facts import annotate
from tcverify.compile_check.tally import Tally

__all__ = ["CheckedBackend", "CheckedPass", "Tally", "annotate", "checked", "checked_backend"]
