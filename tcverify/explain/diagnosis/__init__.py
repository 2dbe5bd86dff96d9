"""Diagnosis: where a rewritten program first computes something that the original does not explain, and why.

Both versions run in lockstep with every node's value kept, and the values are related (see `relations`). The first value
on the way to a wrong output that nothing explains is where the two versions diverge.
"""

from tcverify.explain.diagnosis.diagnosing import diagnose
from tcverify.explain.diagnosis.divergence import Diagnosis, Divergence

__all__ = ["Diagnosis", "Divergence", "diagnose"]
