"""Recipes for the values of captured inputs.

Inputs and parameters are drawn at random: initial values (ones, zeros) would hide defects. Integers are drawn in the
range that their readers allow. Buffers and constants keep their values if known: they are indices, tables and masks.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from tcverify.capturing.record import InputRole
from tcverify.ops import TensorSpec, qualified_name
from tcverify.program import Recipe
from tcverify.program.inputs import MAX_GIVEN

#: Ops that take indices: where these stand among the arguments, and into which argument and dim they point. A dim of None is
#: an argument of the op that says which.
_INDEXING: dict[str, tuple[int, int, int | None]] = {
    "aten::embedding": (1, 0, 0),
    "aten::index_select": (2, 0, None),
    "aten::gather": (2, 0, None),
    "aten::scatter.src": (2, 0, None),
    "aten::scatter.value": (2, 0, None),
    "aten::scatter_add": (2, 0, None),
    "aten::nll_loss_forward": (1, 0, 1),
}

#: Ops whose results are in the range of their operand.
_KEEPS_RANGE = ("view", "reshape", "slice", "select", "unsqueeze", "squeeze", "expand", "clone", "_to_copy", "t", "transpose",
                "permute", "alias", "detach", "_unsafe_view", "split", "chunk", "cat", "contiguous")  # fmt: skip


def recipe_of(node: fx.Node, spec: TensorSpec, role: InputRole, value: torch.Tensor | None) -> Recipe:
    """The recipe for the values of the input that `node` reads.

    Args:
        value: its value when it was captured, if known.
    """
    known = value is not None and not isinstance(value, FakeTensor) and value.numel() <= MAX_GIVEN
    kept = known and role in ("buffer", "constant") and not _unwritten(value)
    if not spec.dtype.is_floating_point and not spec.dtype.is_complex:
        if kept and value is not None:
            return given_recipe(value)
        if spec.dtype == torch.bool:
            return Recipe("mask")
        example = value if known and value is not None and value.numel() else None
        if example is not None and example.double().min() < 0:  # such as the label that a loss ignores
            return given_recipe(example)
        most = DEFAULT_RANGE if example is None else int(example.double().max()) + 1
        return Recipe("integers", float(_range(node) or most))
    if kept and value is not None:
        return given_recipe(value)
    if role == "parameter" and len(spec.shape) == 1 and _multiplies(node):
        return Recipe("norm_weight")
    if role == "parameter" and len(spec.shape) > 1:  # products of it are about as large as what it multiplies
        return Recipe(scale=round(math.sqrt(3 / max(spec.shape[-1], 3)), 4))
    return Recipe()


#: Number of elements of a tensor that are compared with that of another rank: reading all of a large model takes long.
_LOOKED_AT = 4096


def digest_of(recipe: Recipe, role: InputRole, value: torch.Tensor | None) -> str | None:
    """What tells the values of a parameter or buffer from those of other ranks; None where they are kept, or not known."""
    if recipe.kind == "given" or role not in ("parameter", "buffer", "constant"):
        return None
    if value is None or isinstance(value, FakeTensor) or value.is_meta or _unwritten(value):
        return None
    flat = value.detach().reshape(-1)
    taken = flat[:: max(1, flat.numel() // _LOOKED_AT)].cpu()
    if taken.is_complex():
        taken = torch.view_as_real(taken.resolve_conj())
    return hashlib.sha256(repr(taken.to(torch.float64).tolist()).encode()).hexdigest()


def _unwritten(value: torch.Tensor | None) -> bool:
    """Whether a value is uninitialised memory: parameters that a fake process group should have sent often are."""
    return value is not None and value.is_floating_point() and bool(value.isnan().any())


def given_recipe(value: torch.Tensor) -> Recipe:
    """The values of a tensor as they are."""
    flat = value.detach().cpu().reshape(-1)
    if flat.dtype.is_complex:  # real and imaginary parts, in turn
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    if flat.dtype.is_floating_point:
        return Recipe("given", values=tuple(map(float, flat.to(torch.float64).tolist())))
    return Recipe("given", values=tuple(int(v) for v in flat.tolist()))


def _multiplies(node: fx.Node) -> bool:
    """Whether a vector is the gain of a norm: its readers multiply by it."""
    names = [qualified_name(user.target) for user in node.users if user.op == "call_function"]
    return any("mul" in name or "norm" in name for name in names)


#: Upper bound of drawn integers whose purpose is unknown.
DEFAULT_RANGE = 2


def _range(node: fx.Node) -> int:
    """The number below which integers are valid for all that reads them as indices; 0 where nothing does."""
    found: list[int] = []
    queue, seen = [node], {node}
    while queue:
        value = queue.pop()
        for user in value.users:
            if user.op != "call_function":
                continue
            bound = _bound(user, value)
            if bound is not None:
                found.append(bound)
            elif qualified_name(user.target).removeprefix("aten::").split(".")[0] in _KEEPS_RANGE and user not in seen:
                seen.add(user)
                queue.append(user)
    return min((bound for bound in found if bound > 0), default=0)


def _bound(user: fx.Node, value: fx.Node) -> int | None:
    name = qualified_name(user.target)
    if name in ("aten::index.Tensor", "aten::index_put", "aten::index_put_") and len(user.args) > 1:
        indices = user.args[1]
        source = _shape(user.args[0])
        if isinstance(indices, (list, tuple)) and source is not None:
            return min(
                (source[i] for i, index in enumerate(indices) if index is value and i < len(source)), default=None
            )
    place = _INDEXING.get(name)
    if place is None or len(user.args) <= max(place[0], place[1]) or user.args[place[0]] is not value:
        return None
    shape = _shape(user.args[place[1]])
    dim: Any = place[2] if place[2] is not None else user.args[1]
    return shape[dim] if shape and type(dim) is int and -len(shape) <= dim < len(shape) else None


def _shape(value: Any) -> tuple[int, ...] | None:
    spec = value.meta.get("val") if isinstance(value, fx.Node) else None
    return spec.shape if isinstance(spec, TensorSpec) else None


__all__ = ["DEFAULT_RANGE", "digest_of", "given_recipe", "recipe_of"]
