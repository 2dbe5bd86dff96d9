"""Evidence `stream-orders`: a lowered program in other orders of its streams."""

from __future__ import annotations

from tcverify.checks import Evidence
from tcverify.execution import Exploration, explore, explore_on_cuda


def explore_streams(evidence: Evidence) -> Exploration | None:
    """Play other orders of the streams: few, or on deep verification all that matter; then on the device, if asked for.

    Only for `interleavings`: what happens-before says of an order is an example, for which alone no order is played.
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
