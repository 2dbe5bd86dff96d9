"""What an op of the original computes on its way: the values that a rewrite has when it takes the op apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tcverify.domains import domain_of
from tcverify.execution import Run
from tcverify.execution.interpreter import RankResult, fill_arguments
from tcverify.execution.plan import ExecutionPlan, known_constant, plans_of, rank_constants
from tcverify.explain.relations.tensors import Values, sum_tensors
from tcverify.ops import REDUCTIONS, Await, Request, Start
from tcverify.ops.reductions import ReduceOp
from tcverify.program import Program
from tcverify.program.graph import RankConstant, Slot

#: Larger operands, elements over all ranks, are not computed with again.
MAX_ELEMENTS = 1 << 17

#: Most steps of one op, and how often what an op is composed of is taken apart again.
MAX_STEPS, MAX_DEPTH = 48, 3

#: A step: what computes it, in a word, and its values by rank.
NamedValues: TypeAlias = tuple[str, Values]


def steps_of(program: Program, run: Run, name: str) -> list[NamedValues]:
    """Return the intermediate results of an op of the original, on all ranks that have it.

    The op runs again on the recorded operands, and torch reports every kernel that it calls; kernels with a
    decomposition in torch are decomposed too. For a reduction, the stacked addends and their sum
    are included.

    Args:
        run: of the program, every node's value kept.
        name: of the node.
    """
    found: dict[int, list[tuple[str, torch.Tensor]]] = {}
    requests: dict[int, Request | Start] = {}
    plans = plans_of(program, domain_of(run.domain))
    for result in run.ranks:
        binding = program.ranks[result.rank]
        if result.values is None or name not in result.values:
            continue
        recorder = _Recorder()
        constants = rank_constants(program.mesh, result.rank, binding.constants)
        request = _again(plans[binding.graph], name, result, constants, recorder, run)
        found[result.rank] = recorder.steps
        if request is not None:
            requests[result.rank] = request
    steps = list(_aligned(found))
    return steps + _reduced(requests)


def _again(
    plan: ExecutionPlan, name: str, result: RankResult, constants: Mapping[str, Any], recorder: _Recorder, run: Run
) -> Request | Start | None:
    """Run one op again, up to its first request when it is a collective, and return that."""
    names = [*plan.placeholders, *(step.name for step in plan.steps)]
    step = next((step for step in plan.steps if step.name == name), None)
    values = result.values or {}
    if step is None or step.op.aliases or step.op.run is None:
        return None

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return values[names[leaf.index]]
        return known_constant(leaf, constants) if isinstance(leaf, RankConstant) else leaf

    filled = {number: fill(Slot(number)) for number in _slots(step.args, step.kwargs)}
    size = sum(v.numel() for v in pytree.tree_leaves(list(filled.values())) if isinstance(v, torch.Tensor))
    if size * len(run.ranks) > MAX_ELEMENTS:
        return None
    filled = {number: pytree.tree_map_only(torch.Tensor, torch.clone, value) for number, value in filled.items()}
    dense = [filled.get(number) for number in range(len(names))]
    args, kwargs = fill_arguments(
        step, dense, lambda leaf: filled[leaf.index] if isinstance(leaf, Slot) else fill(leaf)
    )
    try:
        with domain_of(run.domain).running(), recorder:
            if not step.op.collective:
                step.run(*args, **kwargs)
                return None
            asked: Request | Start | Await = next(step.run(result.rank, *args, **kwargs))
            return asked if not isinstance(asked, Await) else None
    except Exception:  # noqa: BLE001 - it ran before; whatever ails it now, there are no further steps
        return None


def _slots(*nested: Any) -> list[int]:
    return [leaf.index for leaf in pytree.tree_leaves(nested, is_leaf=_is_slot) if _is_slot(leaf)]


def _is_slot(value: Any) -> bool:
    return isinstance(value, Slot)


class _Recorder(TorchDispatchMode):
    """Keeps what kernels return, unless they but show it in another way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[str, torch.Tensor]] = []
        self._depth = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Of torch: whether to wrap the mode for torch.compile, whose import takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in () if func.is_view else pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and len(self.steps) < MAX_STEPS:
                self.steps.append((_label(func), value.detach().clone()))
        apart = decomposition_table.get(func)
        if apart is not None and func not in _PRIMITIVE and self._depth < MAX_DEPTH and not _writes(func):
            self._take_apart(func, apart, args, kwargs or {})
        return result

    def _take_apart(self, func: Any, apart: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = len(self.steps)
        self._depth += 1
        try:
            with self:
                apart(*args, **kwargs)
        except Exception:  # noqa: BLE001 - torch's decomposition does not hold for this domain or these arguments
            return
        finally:
            self._depth -= 1
        if len(self.steps) < MAX_STEPS and all(label == _label(func) for label, _ in self.steps[known:]):
            _PRIMITIVE.add(func)
            del self.steps[known:]


#: Kernels whose decomposition has shown to be one kernel of their own name.
_PRIMITIVE: set[Any] = set()


def _label(func: Any) -> str:
    return str(func.name()).split("::")[-1].split(".")[0]


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable)


def _aligned(found: Mapping[int, list[tuple[str, torch.Tensor]]]) -> Iterable[NamedValues]:
    """Steps that all ranks take, in order."""
    for taken in zip(*found.values(), strict=False):
        if len({label for label, _ in taken}) == 1:
            yield taken[0][0], dict(zip(found, (value for _, value in taken), strict=True))


def _reduced(requests: Mapping[int, Request | Start]) -> list[NamedValues]:
    """The addends of a collective side by side, and their sum, by rank."""
    if any(request.collective.resharding is not None for request in requests.values()):
        return _resharded(requests)
    addends: dict[int, torch.Tensor] = {}
    sums: dict[int, torch.Tensor] = {}
    for rank, request in requests.items():
        group = request.collective.communicator
        if request.collective.reduce_op is None or not all(member in requests for member in group):
            return []
        parts = [requests[member].tensor for member in group]
        whole = sum_tensors(parts)
        if whole is None:
            return []
        addends[rank], sums[rank] = torch.stack(parts), whole
    return [("addends", addends), ("sum", sums)] if requests else []


def _resharded(requests: Mapping[int, Request | Start]) -> list[NamedValues]:
    """Of a resharding that reduces: what each rank has of it, reduced; of ranks that have nothing, what changes nothing."""
    own: dict[int, torch.Tensor] = {}
    for rank, request in requests.items():
        made = request.collective.resharding
        if made is None or made.dim is None or made.reduce_op is None:
            return []
        if rank in made.source.mesh:
            parts = request.tensor.unbind(made.dim)
            whole = reduce(REDUCTIONS[made.reduce_op], parts)
            own[rank] = (whole / len(parts) if made.reduce_op == "avg" else whole).unsqueeze(made.dim)
        else:
            shape = [1 if dim == made.dim else size for dim, size in enumerate(made.shape)]
            neutral = neutral_of(made.reduce_op, request.tensor.dtype)
            if neutral is not None:
                own[rank] = torch.full(shape, neutral, dtype=request.tensor.dtype)
    return [("addend", own)] if own else []


def neutral_of(reduce_op: ReduceOp, dtype: torch.dtype) -> float | int | None:
    """What changes no value that it is reduced with; None where nothing does."""
    if reduce_op in ("min", "max"):
        sign = 1 if reduce_op == "min" else -1
        if dtype.is_floating_point:
            return sign * math.inf
        return None if dtype is torch.bool else (torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min)
    return {"sum": 0, "avg": 0, "product": 1, "band": -1, "bor": 0, "bxor": 0}.get(reduce_op)
