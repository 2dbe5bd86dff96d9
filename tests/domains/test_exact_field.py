"""The prime field against Python's integers and fractions, its hashes, and how literals are read."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tcverify.domains.exact import field
from tcverify.domains.exact.field import AT_ONE, AT_ZERO, BLOCK, EVEN, ODD, H, P, residue

aten = torch.ops.aten
FEW = settings(max_examples=50, deadline=None)
RESIDUES = st.lists(st.integers(-H, H), min_size=1, max_size=8)
#: Floats as programs write them, and any others.
LITERALS = st.floats(allow_nan=False, allow_infinity=False) | st.decimals(-1000, 1000, places=4).map(float)


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def symmetric(n: int) -> int:
    """The residue of an integer, by Python alone."""
    r = n % P
    return r - P if r > H else r


def of_fraction(q: Fraction) -> int:
    return symmetric(q.numerator * pow(q.denominator, -1, P))


# ------------------------------------------------------------------------------------------------------------ laws


def test_p_is_a_prime_and_no_sum_of_a_block_of_products_is_rounded() -> None:
    assert all(P % n for n in range(2, math.isqrt(P) + 1))
    assert BLOCK * H * H < 2**53


@FEW
@given(st.lists(st.integers(-(2**53) + 1, 2**53 - 1), min_size=1, max_size=8))
@example([H, H + 1, -H, -H - 1, P, -P, 2**53 - 1, 1 - 2**53, 0])
def test_canonical_takes_any_integer_to_its_residue(values: list[int]) -> None:
    assert field.canonical(tensor(values)).tolist() == [symmetric(n) for n in values]


@FEW
@given(st.integers(1 - 2**33 // P, 2**33 // P), st.integers(-2, 2))
def test_canonical_does_not_round_next_to_multiples_of_half_of_p(multiple: int, beside: int) -> None:
    n = multiple * P + H + beside
    assert field.canonical(tensor([n])).item() == symmetric(n)


@FEW
@given(RESIDUES, st.integers(-H, H))
def test_products_are_those_of_integers(values: list[int], factor: int) -> None:
    assert field.product(tensor(values), tensor(factor)).tolist() == [symmetric(n * factor) for n in values]


@FEW
@given(RESIDUES)
def test_what_is_multiplied_with_its_inverse_is_one_and_zero_has_none(values: list[int]) -> None:
    inverses = field.inverse(tensor(values))
    assert inverses.tolist() == [symmetric(pow(n, -1, P)) if n else 0 for n in values]


@FEW
@given(RESIDUES, st.integers(-9, 40))
def test_powers_are_those_of_integers(values: list[int], exponent: int) -> None:
    expected = [symmetric(pow(n, exponent, P)) if n or exponent >= 0 else 0 for n in values]
    assert field.power(tensor(values), exponent).tolist() == expected


@FEW
@given(RESIDUES)
def test_the_product_of_all_is_that_of_integers(values: list[int]) -> None:
    assert field.product_along(tensor(values), 0, False).item() == symmetric(math.prod(values))
    assert field.product_along(tensor([values, values]), 1, True).shape == (2, 1)


def test_the_product_of_nothing_is_one() -> None:
    assert field.product_along(torch.zeros(2, 0, dtype=torch.float64), 1, False).tolist() == [1.0, 1.0]


def test_matrix_products_longer_than_a_block_are_not_rounded() -> None:
    a, b = torch.full((1, 2 * BLOCK + 3), float(H), dtype=torch.float64), torch.full((2 * BLOCK + 3, 1), float(-H))
    expected = symmetric(-(2 * BLOCK + 3) * H * H)
    assert field.matmul(a, b.double(), aten.mm.default).tolist() == [[expected]]
    assert field.matmul(a, b.double().squeeze(1), aten.mv.default).tolist() == [expected]


# ---------------------------------------------------------------------------------------------------------- hashes


@pytest.mark.parametrize("function", ["exp", "sin", "anything"])
def test_hashes_spread_over_all_residues_and_depend_on_draw_and_function(function: str) -> None:
    x = torch.arange(2, 1 << 16, dtype=torch.float64)
    found = field.keyed_hash(function, 0, x)
    assert bool(((found == found.round()) & (found.abs() <= H)).all())
    sixteenths = ((found + H) * 16 / P).floor().long().bincount(minlength=16)
    assert int((sixteenths - 4096).abs().max()) < 320  # five standard deviations
    assert int(found.unique().numel()) > 63_000  # of 65534 draws of 1048573, 2000 meet by chance
    assert int((field.keyed_hash(function, 1, x) == found).sum()) < 5
    assert int((field.keyed_hash(f"{function} other", 0, x) == found).sum()) < 5
    assert torch.equal(field.keyed_hash(function, 0, x), found)


@FEW
@given(RESIDUES)
def test_hashes_keep_signs_of_odd_and_even_functions(values: list[int]) -> None:
    x = tensor(values)
    for function in ODD:
        assert torch.equal(field.keyed_hash(function, 0, -x), -field.keyed_hash(function, 0, x))
        assert field.keyed_hash(function, 0, tensor([0, -0.0])).tolist() == [0, 0]
    for function in EVEN:
        assert torch.equal(field.keyed_hash(function, 0, -x), field.keyed_hash(function, 0, x))


def test_hashes_keep_the_values_of_the_tables_as_torch_has_them() -> None:
    for table, at in ((AT_ZERO, 0.0), (AT_ONE, 1.0)):
        for function, value in table.items():
            assert getattr(torch, function)(tensor(at)).item() == value
            assert field.keyed_hash(function, 0, tensor(at)).item() == value
            assert field.keyed_smooth_function(function, tensor(at)).item() == pytest.approx(value, abs=1e-14)


def test_only_exp_takes_infinities() -> None:
    infinities = tensor([-math.inf, math.inf])
    assert field.keyed_hash("exp", 0, infinities)[0].item() == 0
    assert field.keyed_hash("exp", 0, infinities)[1].isnan()
    assert field.keyed_hash("sqrt", 0, infinities).isnan().all()


# ------------------------------------------------------------------------------------------- functions of other reals


@FEW
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8))
def test_exchanged_functions_are_smooth_and_keep_signs(values: list[float]) -> None:
    x = tensor(values)
    for function in ("exp", "sqrt", "sin", "cos", "log", "anything"):
        moved = (
            field.keyed_smooth_function(function, x * (1 + 1e-12)) - field.keyed_smooth_function(function, x)
        ).abs()
        assert bool((moved <= 1e-9 * (1 + x.abs())).all())
    assert torch.equal(field.keyed_smooth_function("sin", -x), -field.keyed_smooth_function("sin", x))
    assert torch.equal(field.keyed_smooth_function("cos", -x), field.keyed_smooth_function("cos", x))
    assert torch.equal(field.scrambled_order(-x), -field.scrambled_order(x))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_exchanged_functions_and_order_obey_no_law_at_any_scale(scale: float) -> None:
    a, b = scale * torch.linspace(0.3, 2, 50, dtype=torch.float64), scale * torch.linspace(0.7, 1, 50).double()
    exp, sqrt = (lambda x: field.keyed_smooth_function("exp", x)), (lambda x: field.keyed_smooth_function("sqrt", x))
    assert bool(((exp(a + b) - exp(a) * exp(b)).abs() > 1e-9 * scale).double().mean() > 0.9)
    assert bool(((sqrt(a) * sqrt(a) - a).abs() > 1e-3 * scale).double().mean() > 0.9)
    positive = field.scrambled_order(a) > 0
    assert 0 < int(positive.sum()) < 50


# ---------------------------------------------------------------------------------------------------------- literals


@FEW
@given(st.integers())
def test_integers_stand_for_themselves(n: int) -> None:
    assert residue(n) == symmetric(n)


@FEW
@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4).filter(lambda d: d % P))
def test_the_quotient_of_integers_stands_for_the_fraction(numerator: int, denominator: int) -> None:
    assert residue(numerator / denominator) == of_fraction(Fraction(numerator, denominator))


def test_a_half_doubled_and_a_tenth_times_ten_are_one() -> None:
    assert symmetric(int(residue(0.5)) * 2) == 1
    assert symmetric(int(residue(0.1)) * 10) == 1
    assert symmetric(int(residue(1e-6)) * 10**6) == 1
    assert symmetric(int(residue(0.1)) + int(residue(0.2))) == residue(0.3)


@FEW
@given(st.integers(-(2**20), 2**20), st.integers(0, 20))
def test_short_dyadic_numbers_stand_for_themselves(mantissa: int, exponent: int) -> None:
    assert residue(math.ldexp(mantissa, -exponent)) == of_fraction(Fraction(mantissa, 1 << exponent))


def test_a_long_dyadic_number_that_no_simple_fraction_rounds_to_stands_for_itself() -> None:
    value = 1e-6 + 2.0**-72
    assert field.simplest_rational(value).denominator > field.MAX_DENOMINATOR
    assert residue(value) == of_fraction(Fraction(value))


@FEW
@given(LITERALS)
def test_the_simplest_fraction_rounds_to_the_literal_and_none_is_simpler(value: float) -> None:
    found = field.simplest_rational(value)
    assert float(found) == value
    assert found.denominator <= Fraction(value).denominator
    if 1 < found.denominator < 200:
        assert not any(float(Fraction(round(value * d), d)) == value for d in range(1, found.denominator))


@FEW
@given(LITERALS)
def test_the_next_float_is_another_number(value: float) -> None:
    """Two literals may have the same residue, by chance of one in P: never neighbours that stand for different fractions."""
    above = math.nextafter(value, math.inf)
    if math.isfinite(above):
        assert field.simplest_rational(value) < field.simplest_rational(above)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 1e-12])
def test_an_epsilon_differs_from_its_neighbours(eps: float) -> None:
    around = [math.nextafter(eps, 0), eps, math.nextafter(eps, 1), math.nextafter(math.nextafter(eps, 1), 1)]
    assert len({residue(value) for value in around}) == 4


def test_infinities_stand_for_themselves_and_nan_for_nothing() -> None:
    assert [residue(math.inf), residue(-math.inf)] == [math.inf, -math.inf]
    with pytest.raises(ValueError, match="NaN"):
        residue(math.nan)


def test_a_fraction_whose_denominator_is_p_is_read_as_the_dyadic_number_that_it_is() -> None:
    assert residue(1 / P) == of_fraction(Fraction(1 / P))
