"""The pass that does nothing: a campaign must never refute it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import fx

from tcverify.passes.base import Pass
from tcverify.program import Contract


class Identity(Pass):
    """Leaves every graph unchanged."""

    name = "identity"
    contract: ClassVar[Contract] = Contract(metadata=True, idempotent=True, identity=True)

    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Do nothing."""
        return ()
