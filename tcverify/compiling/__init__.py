"""Verification inside a real compile: passes that are verified on the graphs that a compiler gives them."""

from tcverify.compiling.backend import CheckedBackend, checked_backend
from tcverify.compiling.checking import Checked, checked
from tcverify.compiling.facts import annotate
from tcverify.compiling.tally import Tally

__all__ = ["Checked", "CheckedBackend", "Tally", "annotate", "checked", "checked_backend"]
