"""The native domain: every value has the dtype that the program says, so that rounding shows."""

from __future__ import annotations

from tcverify.domains.base import Domain


class Native(Domain):
    """Carries values as they are."""

    name = "native"

    @property
    def carries(self) -> bool:
        """See `Domain.carries`."""
        return False


NATIVE = Native()
