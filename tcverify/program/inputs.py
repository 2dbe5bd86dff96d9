"""Inputs of a program: their global shape, placement and the recipe of their values.

A value is a pure function of (seed, input, index in the global tensor, coordinates of the mesh dims over which the input
varies), computed by a counter-based hash: the same on every machine, in every process and in every torch version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

import torch

from tcverify.domains import FLOAT64, Domain, Exact, canonical, residue, residues
from tcverify.errors import ProgramError, UnsupportedOp
from tcverify.program.mesh import Mesh, MeshDim
from tcverify.program.placement import VARIES, Placement, chunk_bounds

#: Kinds of recipes.
RecipeKind: TypeAlias = Literal[
    "uniform", "zero_rows", "cancelling", "norm_weight", "constant", "integers", "wide", "mask", "given"
]

#: Properties of the values of an input. All except constants, integers, masks and given values have mixed signs.
RECIPES: dict[RecipeKind, str] = {
    "uniform": "independent values in (−scale, scale)",
    "zero_rows": "uniform, with about half of the rows (last dim) zero",
    "cancelling": "uniform, but the members of a group over which the input varies sum to 1e-6 of their size",
    "norm_weight": "values in (0.5, 1.5) · scale",
    "constant": "scale everywhere",
    "integers": "integers in [0, scale)",
    "wide": "integers of which floating point keeps none: odd ones of 2^52 to 2^62 in size, cut to the dtype",
    "mask": "booleans, True with probability 3/4; the first of each row is True",
    "given": "the values that are given: constants of captured graphs (indices, tables, masks)",
}

#: Largest number of given values of an input.
MAX_GIVEN = 1 << 16


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the values of an input are generated; see `RECIPES`.

    Attributes:
        values: for kind "given", the elements of the global tensor in row-major order; if the input varies between ranks, those
            of all members in the order of their coordinates in the mesh dims over which it varies.
    """

    kind: RecipeKind = "uniform"
    scale: float = 1.0
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.values) > MAX_GIVEN:
            raise ProgramError(f"an input is given {len(self.values)} values; at most {MAX_GIVEN} are kept")
        if self.values and self.kind != "given":
            raise ProgramError(f"an input of recipe '{self.kind}' is given values", "only recipe 'given' takes some")
        if self.kind not in RECIPES:
            raise ProgramError(f"'{self.kind}' is not an input recipe", f"use one of {', '.join(RECIPES)}")
        if not math.isfinite(self.scale):
            raise ProgramError(f"the scale {self.scale} of an input recipe is not finite")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of a program, by the name of its placeholder.

    Attributes:
        shape: global shape; the part of a rank follows from its placements.
        placements: (mesh dim, placement) pairs; dims that are not named are replicated. Several shards of one tensor dim
            nest in the order given.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    placements: tuple[tuple[str, Placement], ...] = ()
    recipe: Recipe = Recipe()

    def bounds(self, mesh: Mesh, rank: int) -> list[tuple[int, int]]:
        """Return [start, end) of this rank's part of the global tensor, per dim."""
        bounds = [(0, size) for size in self.shape]
        for dim_name, placement in self.placements:
            if placement.kind != "shard" or placement.dim is None:
                continue
            if placement.dim >= len(self.shape):
                raise ProgramError(
                    f"input '{self.name}' of shape {list(self.shape)} cannot be sharded on dim {placement.dim}"
                )
            dim = mesh.dim(dim_name)
            start, end = bounds[placement.dim]
            low, high = chunk_bounds(end - start, len(dim.group(rank)), dim.position(rank))
            bounds[placement.dim] = (start + low, start + high)
        return bounds

    def check_given(self) -> None:
        """Raise `ProgramError` unless the number of given values equals the number of elements."""
        size, given = self._given_size, len(self.recipe.values)
        if self.recipe.kind == "given" and (given % size if size else given):
            raise ProgramError(
                f"input '{self.name}' of shape {list(self.shape)} is given {given} values",
                f"give {size} for every member over which it varies",
            )

    def local_shape(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Shape of the part of `rank`."""
        return tuple(end - start for start, end in self.bounds(mesh, rank))

    def values(self, mesh: Mesh, rank: int, seed: int, domain: Domain = FLOAT64) -> torch.Tensor:
        """Return this rank's values, contiguous, on the CPU. The caller may write into it.

        They are of `dtype`, but for residues, which float64 carries.
        """
        if self._alike:
            return self.values_of(mesh, [rank], seed, domain)[0]
        draw = domain.draw if isinstance(domain, Exact) and self.dtype.is_floating_point else None
        varying = self._varying(mesh)
        coordinates = tuple(dim.position(rank) for dim in varying)
        members = math.prod(len(dim.group(rank)) for dim in varying)
        last = all(dim.position(rank) == len(dim.group(rank)) - 1 for dim in varying)
        if self.recipe.kind == "cancelling" and members > 1 and last:
            lengths = [len(dim.group(rank)) for dim in varying]
            others = [tuple(c) for c in torch.cartesian_prod(*map(torch.arange, lengths)).reshape(members, -1).tolist()]
            addends = self._global(seed, [other for other in others if other != coordinates], draw)
            small = 1e-6 if draw is None else residue(1e-6)
            whole = small * self._global(seed, [coordinates], draw)[0] - addends.sum(0)
            whole = whole if draw is None else canonical(whole)
        elif self.recipe.kind == "given":
            whole = self._given([len(dim.group(rank)) for dim in varying], coordinates, draw)
        else:
            whole = self._global(seed, [coordinates], draw)[0]
        bounds = self.bounds(mesh, rank)
        part = whole
        if any(start or end != size for (start, end), size in zip(bounds, self.shape, strict=True)):
            part = whole[tuple([slice(start, end) for start, end in bounds])]
        dtype = self.dtype if draw is None else torch.float64
        return part.to(dtype, memory_format=torch.contiguous_format, copy=True)

    def values_of(self, mesh: Mesh, ranks: Sequence[int], seed: int, domain: Domain = FLOAT64) -> torch.Tensor:
        """Return the values of several ranks whose parts have the same shape: [ranks, *shape of a part]. See `values`."""
        if not self._alike:
            return torch.stack([self.values(mesh, rank, seed, domain) for rank in ranks])
        draw = domain.draw if isinstance(domain, Exact) and self.dtype.is_floating_point else None
        varying = self._varying(mesh)
        whole = self._global(seed, [tuple(dim.position(rank) for dim in varying) for rank in ranks], draw)
        dtype = self.dtype if draw is None else torch.float64
        return whole.to(dtype, memory_format=torch.contiguous_format, copy=True)

    @property
    def _alike(self) -> bool:
        """Whether ranks hold whole tensors that are generated in the same way."""
        return self.recipe.kind not in ("cancelling", "given") and all(p.kind != "shard" for _, p in self.placements)

    @property
    def _given_size(self) -> int:
        """Number of values given for one member: two per complex element."""
        return math.prod(self.shape) * (2 if self.dtype.is_complex else 1)

    def _given(self, lengths: Sequence[int], coordinates: Sequence[int], draw: int | None) -> torch.Tensor:
        """The global tensor of the member at these coordinates, from the given values."""
        number, size = 0, self._given_size
        for length, coordinate in zip(lengths, coordinates, strict=True):
            number = number * length + coordinate
        number = number if len(self.recipe.values) > size else 0  # the same for all members
        chosen = self.recipe.values[number * size : (number + 1) * size]
        if draw is not None:
            if any(map(math.isnan, chosen)):
                raise UnsupportedOp(f"the input '{self.name}'", "the exact domain has no NaN, which it is given")
            chosen = tuple(value if math.isinf(value) else residue(value) for value in chosen)
        if self.dtype.is_complex:
            return torch.view_as_complex(torch.tensor(chosen, dtype=torch.float64).reshape(*self.shape, 2))
        wide = torch.float64 if self.dtype.is_floating_point else torch.int64
        return torch.tensor(chosen, dtype=wide).reshape(self.shape)

    def _varying(self, mesh: Mesh) -> list[MeshDim]:
        return [mesh.dim(name) for name, p in self.placements if p.kind in VARIES]

    def _global(self, seed: int, members: Sequence[tuple[int, ...]], draw: int | None) -> torch.Tensor:
        """The global tensors of the members at these coordinates: float64, or int64 of wide integers. Never write into it.

        Args:
            draw: number of the exact domain's draw. Residues are equally distributed, regardless of the recipe's magnitudes;
                its zeros, integers, constants and sums are kept.
        """
        shape, kind, scale = (len(members), *self.shape), self.recipe.kind, self.recipe.scale
        if kind == "constant":
            return torch.full(shape, scale if draw is None else residue(scale), dtype=torch.float64)
        of_residues = draw is not None and kind not in ("integers", "mask")
        labels = [_label(self.name, coordinates, draw if of_residues else None) for coordinates in members]
        unit = _uniform(seed, labels, self.shape)
        if of_residues:
            unit = residues(unit)
            kind, scale = "zero_rows" if kind == "zero_rows" else "uniform", 1.0 if scale else 0.0
        if kind == "norm_weight":
            return (1.0 + unit / 2) * scale
        if kind == "integers":
            return ((unit + 1) / 2 * scale).floor()
        if kind == "wide" and draw is None:
            return (unit * 2**52).to(torch.int64) * 1026 + unit.sign().to(torch.int64)
        if kind == "mask":
            mask = unit < 0.5
            if self.shape and self.shape[-1]:
                mask[..., 0] = True
            return mask.to(torch.float64)
        if kind == "zero_rows" and self.shape:  # which rows are zero must not depend on the rank
            rows = _uniform(seed, [f"{self.name} rows"], (*self.shape[:-1], 1))
            return torch.where(rows < 0, unit, torch.zeros_like(unit)) * scale
        return unit * scale


def prepare_inputs(specs: Sequence[InputSpec], mesh: Mesh, rank: int, seed: int, domain: Domain = FLOAT64) -> None:
    """Generate the numbers for these inputs together: for small tensors this costs little more than for one."""
    draw = domain.draw if isinstance(domain, Exact) else None
    labels = [
        (_label(spec.name, tuple(dim.position(rank) for dim in spec._varying(mesh)), draw), spec.shape)
        for spec in specs
        if spec.recipe.kind not in ("constant", "given") and math.prod(spec.shape) <= _KEPT_ELEMENTS
    ]
    missing = [(label, shape) for label, shape in dict.fromkeys(labels) if (seed, label, shape) not in _UNITS]
    if missing:
        _keep(seed, missing, _hashed(seed, missing))


#: Largest number of elements of all inputs of one rank: 2 GiB of float64.
MAX_INPUT_ELEMENTS = 1 << 28


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the inputs of a program come from: their specs, the mesh that they are placed on, and the seed."""

    mesh: Mesh
    inputs: tuple[InputSpec, ...]
    seed: int

    def chosen(self, names: Sequence[str], rank: int) -> tuple[InputSpec, ...]:
        """Return the specs of the inputs of these names, in this order.

        Raises:
            ProgramError: they are too large for one rank.
        """
        by_name = {spec.name: spec for spec in self.inputs}
        specs = tuple([by_name[name] for name in names])
        elements = sum(math.prod(spec.shape) for spec in specs)
        if elements > MAX_INPUT_ELEMENTS:
            raise ProgramError(
                f"the inputs of rank {rank} have {elements} elements; at most {MAX_INPUT_ELEMENTS} are allowed",
                "give the program smaller sizes: a model with a small hidden size has the same graph",
            )
        return specs


#: Largest tensor that is cached: 512 of them take 256 MiB.
_KEPT_ELEMENTS = 1 << 16

#: Numbers in (−1, 1) by seed, label and shape: shared by ranks and by both versions of a program. Never write into them.
_UNITS: dict[tuple[int, str, tuple[int, ...]], torch.Tensor] = {}


def _label(name: str, coordinates: Sequence[int], draw: int | None = None) -> str:
    label = f"{name}{list(coordinates)}"
    return label if draw is None else f"{label} {draw}"


def _uniform(seed: int, labels: Sequence[str], shape: tuple[int, ...]) -> torch.Tensor:
    """Independent values in (−1, 1), float64, for each label: [labels, *shape]."""
    if len(labels) > 1:
        return _hashed_alike(seed, labels, shape)
    (label,) = labels
    unit = _UNITS.get((seed, label, shape))
    if unit is None:
        (unit,) = made = _hashed(seed, [(label, shape)])
        if math.prod(shape) <= _KEPT_ELEMENTS:  # large ones would stay in memory long after their program
            _keep(seed, [(label, shape)], made)
    return unit[None]


def _keep(seed: int, wanted: Sequence[tuple[str, tuple[int, ...]]], made: Sequence[torch.Tensor]) -> None:
    if len(_UNITS) + len(made) > 512:
        _UNITS.clear()
    _UNITS.update(((seed, label, shape), unit) for (label, shape), unit in zip(wanted, made, strict=True))


_MASK_33 = (1 << 31) - 1  # the part of a 64-bit value that remains after a logical shift by 33


def _multiples(count: int) -> torch.Tensor:
    """The first multiples of the golden ratio's 64 bits. Never write into it."""
    if count > _KEPT_ELEMENTS:
        return torch.arange(1, count + 1, dtype=torch.int64) * -7046029254386353131
    return _all_multiples()[:count]


@cache
def _all_multiples() -> torch.Tensor:
    return torch.arange(1, _KEPT_ELEMENTS + 1, dtype=torch.int64) * -7046029254386353131


def _hashed(seed: int, wanted: Sequence[tuple[str, tuple[int, ...]]]) -> list[torch.Tensor]:
    """For each label and shape, values of a counter, keyed by seed and label."""
    sizes = [math.prod(shape) for _, shape in wanted]
    counters = [_multiples(size) + _key(seed, label) for size, (label, _) in zip(sizes, wanted, strict=True)]
    numbers = _mixed(torch.cat(counters))
    return [part.reshape(shape) for part, (_, shape) in zip(numbers.split(sizes), wanted, strict=True)]


def _hashed_alike(seed: int, labels: Sequence[str], shape: tuple[int, ...]) -> torch.Tensor:
    """As `_hashed`, for labels of one shape: [labels, *shape]."""
    keys = torch.tensor([_key(seed, label) for label in labels], dtype=torch.int64)
    return _mixed(_multiples(math.prod(shape)) + keys[:, None]).reshape(len(labels), *shape)


def _key(seed: int, label: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {label}".encode(), digest_size=8).digest(), "little", signed=True)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Numbers in (−1, 1) from integers of 64 bits, by the finaliser of murmur3. Writes into `x`."""
    x ^= (x >> 33) & _MASK_33
    x *= -49064778989728563
    x ^= (x >> 33) & _MASK_33
    x *= -4265267296055464877
    x ^= (x >> 33) & _MASK_33
    # 52 bits, centred on the half-integers: never 0, never ±1
    return ((x >> 12).to(torch.float64) + 0.5) * 2.0**-51
