"""The sound ones of the small passes are sound: what the gallery holds against their mutants is the mutants' fault."""

from __future__ import annotations

import random

import pytest

from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.strategies import DECODERS, all_meshes
from tcverify.verification.verifier import verify
from tests.mutants.foreign import Foreign
from tests.mutants.foreign_catalogue import MUTANTS, SOUND

#: Programs per strategy and pass; `benchmarks/domains.py` looks at more, in all domains.
PROGRAMS = 4


@pytest.mark.parametrize("pass_", SOUND, ids=lambda pass_: pass_.name)
def test_a_small_sound_pass_passes(pass_: type[Foreign]) -> None:
    subject = InProcess(prepare_pass(pass_, "", {}))
    choose = random.Random(pass_.name)
    for name in ("structured", "wild"):
        for number in range(PROGRAMS):
            mesh = choose.choice(all_meshes((2, 4)[number % 2]))
            verdict = verify(subject, DECODERS[name].decode(mesh, choose.randbytes(DECODERS[name].width)))
            assert verdict.status == "passed", (verdict.findings, verdict.doubts)


def test_every_small_pass_is_known_as_sound_or_as_a_mutant() -> None:
    assert not {pass_.name for pass_ in SOUND} & MUTANTS.keys()
    assert all(issubclass(mutant, Foreign) for mutant in MUTANTS.values())
    assert all((mutant.__doc__ or "").splitlines()[0].endswith(").") for mutant in MUTANTS.values())
