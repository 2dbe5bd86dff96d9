"""A pass as a test. `pytest -n auto` uses all cores, `--tcverify-profile ci` or `nightly` draws more programs."""

import tcverify
from tcverify.passes import SequenceParallel
from tcverify.strategies import transformer_programs


@tcverify.verifies(SequenceParallel, programs=transformer_programs, world_sizes=(2, 4))
def test_sequence_parallel(verdict):
    # Called for each world size after its programs have passed; a refuted pass fails the test before.
    assert verdict.share("P1") > 0.25  # the share of programs in which the pattern was rewritten
    assert verdict.statistics.inconclusive == 0
