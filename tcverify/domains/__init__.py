"""Number domains: what carries a value while a program runs."""

from tcverify.domains.base import Domain
from tcverify.domains.exact.algebra import ORDER
from tcverify.domains.exact.domain import DRAWS, MORE_DRAWS, Exact, ScrambledReals, residues
from tcverify.domains.exact.field import canonical, residue
from tcverify.domains.float64 import FLOAT64, Float64
from tcverify.domains.native import NATIVE
from tcverify.domains.uninitialized import make_poisoned, poison_, spoil_
from tcverify.registry.choices import DOMAINS


def domain_of(name: str) -> Domain:
    """Return the domain of a name, as messages and runs give it: "float64", "native", "exact:0", …"""
    if name.startswith("exact:"):
        return Exact(int(name.removeprefix("exact:")))
    return {"float64": FLOAT64, "native": NATIVE}[name]


__all__ = [
    "DOMAINS",
    "DRAWS",
    "FLOAT64",
    "MORE_DRAWS",
    "NATIVE",
    "ORDER",
    "Domain",
    "Exact",
    "Float64",
    "ScrambledReals",
    "canonical",
    "domain_of",
    "make_poisoned",
    "poison_",
    "residue",
    "residues",
    "spoil_",
]
