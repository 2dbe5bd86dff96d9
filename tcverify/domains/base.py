"""What a number domain is: what carries a value while a program runs, and what ops compute on it."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tcverify.registry.choices import DOMAINS, DomainName, is_one_of


class Domain:
    """A number domain. Ops run as torch defines them unless `running` says otherwise.

    Attributes:
        name: "float64", "native" or "exact"; with a number after a colon if there are several draws of inputs.
        unwritten: contents of uninitialised floating-point memory; see `uninitialized`.
    """

    name = "native"
    unwritten = math.nan

    @property
    def kind(self) -> DomainName:
        """The name without the number of a draw."""
        kind = self.name.partition(":")[0]
        assert is_one_of(kind, DOMAINS)
        return kind

    @property
    def carries(self) -> bool:
        """Whether all floating dtypes are carried by float64."""
        return True

    def carry(self, value: Any) -> Any:
        """Return `value` as this domain carries it. Tensors keep their shape; non-floating ones are returned as they are."""
        return value

    def constant(self, value: Any) -> Any:
        """As `carry`, for a tensor that belongs to a graph and not to its inputs."""
        return self.carry(value)

    def literal(self, value: Any) -> Any:
        """Return a constant argument of a node as this domain reads it: floating dtypes become the carrier's."""
        if self.carries and isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        return value

    def running(self) -> AbstractContextManager[Any]:
        """A context in which torch's ops compute in this domain. Not to be held across other domains' runs."""
        return nullcontext()

    def settle(self, total: torch.Tensor) -> torch.Tensor:
        """Make what a process group has summed a value of this domain."""
        return total


def carry_nested(value: Any, domain: Domain) -> Any:
    """Convert the elements of a tuple or list."""
    made = [domain.carry(v) for v in value]
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
