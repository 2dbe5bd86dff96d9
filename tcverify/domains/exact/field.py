"""The prime field of the exact domain: residues of P on float64 carriers.

A residue is an integer in [−H, H], carried as float64. Sums, products, quotients by values other than 0 and matrix products
are exact, whatever their order: equal programs agree bit for bit. Functions that no field has (exp, sqrt, …) are hashes:
equal arguments give equal results, and nothing else is known of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

import torch

#: The largest prime for which 2¹⁵ products of two residues still add up exactly in float64.
P = 1048573
#: Residues are symmetric: −H, …, H.
H = (P - 1) // 2
#: Most products that one float64 sum holds.
BLOCK = 1 << 15
#: Largest denominator of a rational that represents a literal.
MAX_DENOMINATOR = 10**8

Tensor = torch.Tensor


def canonical(x: Tensor) -> Tensor:
    """Return the residues of integers of magnitude below 2⁵³. The result is a fresh tensor; infinities become NaN."""
    # (x + H) / P is correctly rounded, and no integer below 2⁵³ is so close below a multiple of P that it would round up.
    return x.sub((x + H).div_(P).floor_(), alpha=P)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise product, with broadcasting."""
    return canonical(a * b)


def power(x: Tensor, exponent: int) -> Tensor:
    """x to the power of an integer; negative ones by the inverse. 0⁰ = 1."""
    if exponent < 0:
        return power(inverse(x), -exponent)
    result = torch.ones_like(x)
    while exponent:
        if exponent & 1:
            result = product(result, x)
        exponent >>= 1
        if exponent:
            x = product(x, x)
    return result


@lru_cache(maxsize=1)
def _inverses() -> Tensor:
    """The inverse of residue r stands at r + H, as int32 (4 MiB)."""
    generator = next(g for g in range(2, P) if all(pow(g, (P - 1) // q, P) != 1 for q in _prime_factors(P - 1)))
    powers = torch.ones(P - 1, dtype=torch.float64)
    known = 1
    while known < P - 1:  # powers[i + known] = powers[i] · g^known
        more = min(known, P - 1 - known)
        powers[known : known + more] = product(powers[:more], torch.tensor(_symmetric(pow(generator, known, P))))
        known += more
    table = torch.zeros(P, dtype=torch.int32)
    # the inverse of g^i is g^(P − 1 − i)
    table[(powers + H).long()] = powers.roll(-1).flip(0).to(torch.int32)
    return table


def _prime_factors(n: int) -> list[int]:
    found, candidate = [], 2
    while n > 1:
        if n % candidate:
            candidate += 1
        else:
            found.append(candidate)
            n //= candidate
    return sorted(set(found))


def inverse(x: Tensor) -> Tensor:
    """The inverse of every element; that of 0 is 0."""
    return _inverses()[(x + H).long()].to(torch.float64)


def matmul(a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Matrix product.

    Args:
        multiply: aten::mm, aten::bmm, aten::mv or aten::dot; a is [..., K], b is [..., K, N] or [K].
    """
    inner = a.shape[-1]
    if inner <= BLOCK:
        return canonical(multiply(a, b))
    dim = -1 if b.dim() == 1 else -2
    pieces = zip(a.split(BLOCK, -1), b.split(BLOCK, dim), strict=True)
    return canonical(torch.stack([canonical(multiply(x, y)) for x, y in pieces]).sum(0))


def product_along(x: Tensor, dim: int, keepdim: bool) -> Tensor:
    """Product over one dim: pairwise, so that it takes the logarithm of its size in steps."""
    x = x.movedim(dim, 0)
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        pairs = product(x[:half], x[half : 2 * half])
        x = torch.cat([pairs, x[2 * half :]])
    x = x[0] if x.shape[0] else torch.ones(x.shape[1:], dtype=torch.float64)
    return x.unsqueeze(dim) if keepdim else x


# ---------------------------------------------------------------------------------------------------------- functions

#: Functions with f(−x) = −f(x), which is kept, and so f(0) = 0; and those with f(−x) = f(x).
ODD = frozenset({"sin", "tan", "tanh", "sinh", "asin", "atan", "asinh", "atanh", "erf", "erfinv", "round", "trunc"})
EVEN = frozenset({"cos", "cosh"})
#: Values that are kept at 0 and at 1, beyond what `ODD` says.
AT_ZERO = {"exp": 1, "exp2": 1, "cos": 1, "cosh": 1, "sqrt": 0, "floor": 0, "ceil": 0}
AT_ONE = {"sqrt": 1, "log": 0, "log2": 0, "log10": 0, "floor": 1, "ceil": 1, "round": 1, "trunc": 1}


@lru_cache(maxsize=1024)
def _key(function: str, draw: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{draw} {function}".encode(), digest_size=8).digest(), "little", signed=True)


def keyed_hash(function: str, draw: int, x: Tensor) -> Tensor:
    """A keyed hash of every element, as a residue. exp(−inf) = 0; other infinities become NaN."""
    argument = x.abs() if function in ODD or function in EVEN else x
    z = argument.nan_to_num(0.0, 0.0, 0.0).long() * -7046029254386353131 + _key(function, draw)
    z ^= (z >> 33) & ((1 << 31) - 1)
    z *= -49064778989728563
    z ^= (z >> 33) & ((1 << 31) - 1)
    z *= -4265267296055464877
    z ^= (z >> 33) & ((1 << 31) - 1)
    # 31 bits, spread over [0, P): the bias is P / 2³¹, and P² < 2⁵³ keeps the product exact
    value = ((z & ((1 << 31) - 1)).to(torch.float64) * (P / 2.0**31)).floor_().sub_(H)
    if function in ODD:
        value *= x.sign().nan_to_num_(0.0)
    if function in AT_ZERO:
        value.masked_fill_(x == 0, AT_ZERO[function])
    if function in AT_ONE:
        value.masked_fill_(x == 1, AT_ONE[function])
        if function in ODD:
            value.masked_fill_(x == -1, -AT_ONE[function])
    infinite = x.isinf()
    if bool(infinite.any()):
        value.masked_fill_(infinite, math.nan)
        if function in ("exp", "exp2"):
            value.masked_fill_(x == -math.inf, 0.0)
    return value


@lru_cache(maxsize=1024)
def _numbers(function: str) -> tuple[float, float, float, float]:
    """Four numbers in (0.5, 1.5) that belong to a function."""
    digest = hashlib.blake2b(f"scrambled {function}".encode(), digest_size=16).digest()
    a, b, c, d = (0.5 + int.from_bytes(digest[i : i + 4], "little") / 2**32 for i in (0, 4, 8, 12))
    return a, b, c, d


def keyed_smooth_function(function: str, x: Tensor) -> Tensor:
    """Another function of real numbers, smooth and keyed by a name, that keeps of the function what `keyed_hash` keeps of it."""
    a, b, c, d = _numbers(function)

    def plain(x: Tensor) -> Tensor:
        wave = (4 + c) * torch.log(x.abs().clamp(min=1e-300))  # so that it is straight nowhere, however close to 0
        if function in EVEN:
            return a * torch.cos(c * x) + b * x.abs() * torch.sin(wave)
        curved = a * x + b * x * torch.sin(wave)
        return curved + torch.sin((1 + c) * x) if function in ODD else curved + torch.cos((1 + c) * x + d)

    value = plain(x)
    zero, one = (plain(torch.tensor(n, dtype=torch.float64)) for n in (0.0, 1.0))
    if function in AT_ONE and (function in ODD or function in AT_ZERO):
        value = value + (AT_ONE[function] - one) * x
        if function in AT_ZERO:
            value = value + (AT_ZERO[function] - zero) * (1 - x)
    elif function in AT_ONE:
        value = value + (AT_ONE[function] - one)
    elif function in AT_ZERO:
        value = value + (AT_ZERO[function] - zero)
    if function in ("exp", "exp2"):
        value = value.masked_fill(x == -math.inf, 0.0)
    return value


def scrambled_order(x: Tensor, order: int = 0) -> Tensor:
    """By what real numbers are ordered where their order is another one: odd, smooth, and mixing all scales. There are many."""
    key = x.sign() * torch.sin((7.3 + 1.7 * order) * torch.log(x.abs().clamp(min=1e-300)))
    # equal numbers have equal keys wherever they stand, although torch may round a function in two ways
    key = (key * 2.0**40).round_().div_(2.0**40)
    return torch.where(x.isfinite(), key, 2 * x)


# ----------------------------------------------------------------------------------------------------------- literals


def _symmetric(n: int) -> float:
    """The residue of an integer of any size."""
    return float((n + H) % P - H)


@lru_cache(maxsize=4096)
def residue(literal: float | int | bool) -> float:
    """Return the residue of a literal of a program; infinities stay infinities.

    That of a float is the simplest rational with a denominator up to 10⁸ that rounds to it, so that 0.1 · 10 = 1 and
    0.5 · 2 = 1 are kept; where there is none, the dyadic number that the float is. Different floats have different rationals.

    Raises:
        ValueError: it is NaN.
    """
    if isinstance(literal, int):
        return _symmetric(literal)
    if math.isnan(literal):
        raise ValueError("NaN has no residue")
    if math.isinf(literal):
        return literal
    value = simplest_rational(literal)
    if value.denominator > MAX_DENOMINATOR or value.denominator % P == 0:
        value = Fraction(literal)
    return _symmetric(value.numerator * pow(value.denominator, -1, P))


def simplest_rational(x: float) -> Fraction:
    """The rational of least denominator that rounds to a float."""
    if x < 0:
        return -simplest_rational(-x)
    exact = Fraction(x)
    if exact.denominator == 1:
        return exact
    below, above = math.nextafter(x, -math.inf), math.nextafter(x, math.inf)
    low = (exact + Fraction(below)) / 2
    high = (exact + Fraction(above)) / 2 if math.isfinite(above) else exact
    found = _between(low, high)
    return found if float(found) == x else exact  # an end of the interval may round away


def _between(low: Fraction, high: Fraction) -> Fraction:
    """The rational of least denominator in [low, high], by their common continued fraction."""
    terms: list[int] = []
    while True:
        whole = low.numerator // low.denominator
        if whole == low or whole < high.numerator // high.denominator:
            terms.append(whole if whole == low else whole + 1)
            break
        terms.append(whole)
        low, high = 1 / (high - whole), 1 / (low - whole)
    value = Fraction(terms[-1])
    for term in reversed(terms[:-1]):
        value = term + 1 / value
    return value
