"""Evidence `stream-orders`: a lowered program with its streams in other orders."""

from __future__ import annotations

from tcverify.checks import Evidence
from tcverify.execution import Exploration, explore, explore_on_cuda


def explore_streams(evidence: Evidence) -> Exploration | None:
    """Try other orders of the streams: a few or, in deep verification, all that matter; then on the device, if requested.

    Only for the check `interleavings`: `happens-before` needs an order only as an example, and that alone is not worth a run.
    """
    assert evidence.request is not None
    program, request, contract = evidence.rewritten, evidence.request, evidence.contract
    if program is None or "interleavings" not in request.checks:
        return None
    run = evidence.runs[0].rewritten
    found = explore(program, reference=run, boundary=contract.boundary, inputs=contract.inputs, systematic=request.deep)
    if request.on_device and found is not None and not found.observations:
        found.observations += explore_on_cuda(program, run, boundary=contract.boundary, inputs=contract.inputs)
        found.failing += dict.fromkeys(observation.order for observation in found.observations)
    return found
