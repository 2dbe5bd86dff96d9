"""Loads passes and applies them to every rank's graph, guarded against their hanging, raising and dying."""

from tcverify.application.applying import apply_pass
from tcverify.application.editing import EditPlace
from tcverify.application.guard import Applied, Guarded, InProcess, Subject, start_ahead, subject_of
from tcverify.application.loading import LoadedPass, load_pass
from tcverify.application.pair import Defect, Pair, PassFacts, PassFailure, Stage
from tcverify.application.reachable import source_of
from tcverify.application.reaching import Point
from tcverify.application.vocabulary import Vocabulary
from tcverify.application.watched import Watch

__all__ = [
    "Applied",
    "Defect",
    "EditPlace",
    "Guarded",
    "InProcess",
    "LoadedPass",
    "Pair",
    "PassFacts",
    "PassFailure",
    "Point",
    "Stage",
    "Subject",
    "Vocabulary",
    "Watch",
    "apply_pass",
    "load_pass",
    "source_of",
    "start_ahead",
    "subject_of",
]
