"""Number domains: what carries a value while a program runs."""

from tcverify.arithmetic.algebra import ORDER
from tcverify.arithmetic.domain import Domain
from tcverify.arithmetic.exact import DRAWS, MORE_DRAWS, Exact, ScrambledReals, residues
from tcverify.arithmetic.field import canonical, residue
from tcverify.arithmetic.float64 import FLOAT64, Float64
from tcverify.arithmetic.native import NATIVE, Native
from tcverify.arithmetic.unwritten import poison_, spoil_, unwritten
from tcverify.catalogue.choices import DOMAINS


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
    "Native",
    "ScrambledReals",
    "canonical",
    "domain_of",
    "poison_",
    "residue",
    "residues",
    "spoil_",
    "unwritten",
]
