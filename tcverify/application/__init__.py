"""Loads passes and applies them to every rank's graph, guarded against hangs, exceptions and crashes."""

from tcverify.application.apply import apply_pass
from tcverify.application.coverage.reachable import Function, source_of
from tcverify.application.coverage.recorder import CodePoint
from tcverify.application.coverage.watched import Watch
from tcverify.application.guarded import AppliedPass, Guarded, InProcess, Subject, start_ahead, subject_of
from tcverify.application.loading import LoadedPass, load_pass
from tcverify.application.pair import Defect, Pair, PassFacts, PassFailure, ScaledDown

__all__ = [
    "AppliedPass",
    "CodePoint",
    "Defect",
    "Function",
    "Guarded",
    "InProcess",
    "LoadedPass",
    "Pair",
    "PassFacts",
    "PassFailure",
    "ScaledDown",
    "Subject",
    "Watch",
    "apply_pass",
    "load_pass",
    "source_of",
    "start_ahead",
    "subject_of",
]
