"""Torch's own ops, of the namespaces aten and prims: they run unchanged, with exceptions.

The exceptions are ops whose result is not a function of their arguments, GPU-only ops, and ops with a device argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tcverify.domains import make_poisoned
from tcverify.errors import UnsupportedOp
from tcverify.ops.dialects.aten_attention import ATTENTION, meaning, shape_function_of
from tcverify.ops.op import TORCH, Op

Tensor = torch.Tensor

#: Ops that return uninitialised memory: it contains values that show up if they are read.
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
#: Ops that read such memory.
_UNINITIALISED = frozenset({"resize_", "resize"})
#: Ops that reach for files or the terminal. Programs come from others, too.
_OUTSIDE = frozenset({"from_file", "save", "_print"})
#: Ops of the compiler's own that draw random numbers without saying so.
_DRAWING = frozenset(
    {
        "inductor_random",
        "inductor_randint",
        "inductor_rand_eager_offset",
        "inductor_rand_eager_offsets",
        "normal",
        "uniform",
    }
)
#: Ops that call `nonzero`, and lack its tag.
_COUNTING = frozenset({"aten::where", "aten::nonzero_numpy"})

#: Ops that order effects by values without elements.
_TOKENS = frozenset({"_make_token", "_sink_tokens"})


def drop_device(value: Any) -> Any:
    """An argument without its device: ops run where the program runs, whatever device it was written for."""
    return None if isinstance(value, torch.device) and value.type != "meta" else value


def is_allocation(name: str) -> bool:
    """Whether the op of a qualified name allocates memory that is never written."""
    namespace, _, rest = name.partition("::")
    return namespace in TORCH and rest.split(".")[0] in _UNWRITTEN


def torch_op(name: str, target: Any) -> Op:
    """Return what an op of torch's own means."""
    if not isinstance(target, torch._ops.OpOverload):
        return Op(name, None, reason="an overload packet; graphs name overloads (torch.ops.aten.add.Tensor)")
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    reason = _reason(name, base, target)
    if reason is not None:
        return Op(name, None, reason=reason)
    if base in _UNWRITTEN:
        return Op(name, partial(make_poisoned, target))
    if namespace == "aten" and base in ATTENTION and not overload:
        run, native, fake = meaning(base, target)
        return Op(name, run, native=native, fake=fake)
    if base in _DROPOUT and not overload:
        kept = _DROPOUT[base]
        return Op(name, partial(_dropped, name, kept), fake=kept, aliases=kept is _dropout)
    if name == "aten::index.Tensor":
        run = partial(_indexed, name, target)
        return Op(name, run, fake=run)
    if namespace == "aten" and base in _BOUNDARIES:
        return Op(name, partial(_between_boundaries, target, _BOUNDARIES[base]), fake=target)
    if name in ("aten::nll_loss_backward", "aten::nll_loss2d_backward"):
        return Op(name, partial(_with_classes, target), fake=target)
    if name == "prims::device_put":
        return Op(name, _moved, fake=_moved)
    if name == "prims::convert_element_type":
        return Op(name, _converted, fake=target)
    schema = target._schema
    aliases = any(one.alias_info is not None for one in (*schema.arguments, *schema.returns))
    if any(a.name == "device" and str(a.type) == "Device" for a in schema.arguments):
        return Op(name, partial(_on_cpu, target), fake=partial(_on_cpu, target), aliases=aliases)
    if namespace == "aten" and not _runs_here(target):
        parts = _decomposition(target)
        if parts is None:
            return Op(name, None, reason="no CPU has a kernel of it, and torch does not decompose it")
        return Op(name, parts, fake=shape_function_of(target))
    return Op(name, target, aliases=aliases or "maybe_aliasing_or_mutating" in _tags(target))


def _tags(target: Any) -> set[str]:
    return {tag.name for tag in target.tags}  # by name: the set of tags grows from one torch to the next


def _reason(name: str, base: str, target: Any) -> str | None:
    """Why an op has no meaning, if it has none."""
    if base in _UNINITIALISED:
        return "its result is uninitialised memory"
    if base in _OUTSIDE:
        return "it reaches outside the program"
    if base in _TOKENS:
        return "it orders effects, which programs say by the order of their nodes"
    if name.startswith("aten::to.prim_"):
        return "TorchScript alone calls it; write aten::to.dtype"  # torch crashes where it is given no dtype
    if name in ("aten::view.dtype", "prims::view_of_dtype"):
        return "it reads the bits of values, which number domains do not carry"
    tags = _tags(target)
    unconditional = base not in ATTENTION and base not in _DROPOUT
    if base in _DRAWING or ("nondeterministic_seeded" in tags and unconditional):
        return "its result is random"
    if name in _COUNTING or (tags & {"dynamic_output_shape", "data_dependent_output"} and name != "aten::index.Tensor"):
        return "its shape depends on data"
    return None


def _converted(a: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype: by the kernel of aten, which takes a tenth of the time of prims' own, and can be vectorised."""
    return torch.ops.aten._to_copy.default(a, dtype=dtype)  # type: ignore[no-any-return]


def _indexed(name: str, target: Any, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Elements by index; how many a mask picks depends on its values."""
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        raise UnsupportedOp(name, "its shape depends on data: an index is a mask")
    return target(x, indices)  # type: ignore[no-any-return]


#: Ops that search in sorted boundaries, and which argument these are.
_BOUNDARIES = {"bucketize": (1, "boundaries"), "searchsorted": (0, "sorted_sequence")}


def _between_boundaries(target: Any, which: tuple[int, str], *args: Any, **kwargs: Any) -> Tensor:
    """Where values lie among boundaries. Raises RuntimeError where these are not sorted, of which any result is right."""
    place, name = which
    boundaries = args[place] if place < len(args) else kwargs[name]
    unsorted = boundaries[..., 1:] < boundaries[..., :-1]
    if kwargs.get("sorter") is None and unsorted.any():
        raise RuntimeError(f"{target}: its boundaries are not sorted, so its result is undefined")
    return target(*args, **kwargs)  # type: ignore[no-any-return]


def _with_classes(target: Any, grad: Tensor, x: Tensor, classes: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A gradient by class. Raises IndexError where a target is none, for which the kernel writes outside of its result."""
    named = dict(zip(("weight", "reduction", "ignore_index"), args, strict=False)) | kwargs
    counted = classes[classes != named["ignore_index"]]
    known = x.shape[min(1, x.dim() - 1)]
    if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < known:
        raise IndexError(f"{target}: a target is none of {known} classes")
    return target(grad, x, classes, *args, **kwargs)  # type: ignore[no-any-return]


def _native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Without dropping anything: the values, and what was kept. Kernels leave that unset outside of training; it is unused."""
    return input.clone(), torch.ones_like(input, dtype=torch.bool)


def _dropout(input: Tensor, p: float, train: bool | None) -> Tensor:
    return input


#: Ops that draw random numbers by default: their definition without drawing.
_DROPOUT: dict[str, Callable[..., Any]] = {
    "native_dropout": _native_dropout, "dropout": _dropout, "feature_dropout": _dropout, "alpha_dropout": _dropout,
}  # fmt: skip


def _dropped(name: str, kept: Callable[..., Any], input: Tensor, p: float, train: bool | None = True) -> Any:
    if p and train is not False:
        raise UnsupportedOp(name, f"its result is random (p={p})")
    return kept(input, p, train)


def _on_cpu(target: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    """An op that needs a device argument."""
    return target(*args, device=torch.device("cpu"), **kwargs)


#: Where an op has a kernel that a CPU runs.
_KEYS = (
    "CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "BackendSelect",
)  # fmt: skip


def _runs_here(target: Any) -> bool:
    name = target.name()
    if not torch._C._dispatch_has_kernel(name):  # of the interpreter of TorchScript, which looks nothing up
        return True
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _KEYS)


def _decomposition(target: Any) -> Callable[..., Any] | None:
    """What torch writes an op as, for where it has no kernel."""
    from torch._decomp import decomposition_table  # late: it takes its time to import

    found: Callable[..., Any] | None = decomposition_table.get(target)
    return found


def _moved(x: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
    """A copy: what a move to another device leaves."""
    return x.clone()


__all__ = ["drop_device", "is_allocation", "torch_op"]
