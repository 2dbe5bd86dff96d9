"""Contract: what a pass promises beyond keeping the meaning of the program."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tcverify.errors import UsageError


@dataclass(frozen=True, slots=True)
class Contract:
    """Promises of a pass. The defaults raise no false alarm on passes that promise nothing.

    Attributes:
        idempotent: a second application changes nothing.
        metadata: inserted and changed nodes carry correct `meta["val"]`. Turn off for passes that leave it to a later step.
        identity: the pass never changes anything; a campaign then does not ask for changes.
    """

    idempotent: bool = False
    metadata: bool = True
    identity: bool = False

    def with_options(self, options: dict[str, str]) -> Contract:
        """Return the contract with `k=v` options applied.

        Raises:
            UsageError: an unknown promise or a value that is not true or false.
        """
        known = {f.name for f in fields(self)}
        changes: dict[str, bool] = {}
        for key, value in options.items():
            if key not in known:
                raise UsageError(f"'{key}' is not a promise of a contract", f"promises are {', '.join(sorted(known))}")
            if value.lower() not in ("true", "false"):
                raise UsageError(f"--contract {key}={value}: the value is not true or false")
            changes[key] = value.lower() == "true"
        return replace(self, **changes)
