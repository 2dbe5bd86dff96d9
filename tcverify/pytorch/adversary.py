"""Runs real code, compiled or not, with the moments at which asynchronous collectives read and write chosen by an adversary.

Between its start and its wait, a functional collective may read its operand and write its result at any moment. Gloo and the
threaded process group take few of these moments, and never the bad ones. Under this mode they are
chosen, so that a race shows every time:

    with Completion("late"):
        result = compiled(x)

Collectives are carried out by the process group that the process has, in the order in which they are issued.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tcverify.errors import UsageError

Tensor = torch.Tensor

#: When collectives read and write: at the start both; at the wait both; or read at the start and write at the wait.
When = Literal["early", "late", "apart"]


@dataclass
class _Flight:
    """A collective that has been issued and has not been waited for.

    Attributes:
        perform: carries it out on operands, and gives its results.
        operands: what it reads: the tensors themselves, or copies from the time of its start.
        results: what it is to write.
    """

    perform: Callable[[list[Tensor]], list[Tensor]]
    operands: list[Tensor]
    results: list[Tensor]


class Completion(TorchDispatchMode):
    """Chooses when `_c10d_functional` collectives read and write.

    Until a collective writes its result, that memory contains poison (NaN, or the largest number of an integer type).
    A wait for one carries out all that were issued before it, in order; so ranks communicate in issue order. Collectives
    without a wait are carried out at the end of the block.

    Args:
        when: "early": a collective reads and writes when it is issued. "late": it reads and writes when it is waited for, so that
            a write to its operand in between shows. "apart": it reads when it is issued and writes when it is waited for.

    Raises:
        UsageError: there is no such choice.

    Example, on each rank of a test that runs on gloo:
        >>> with Completion("late"):
        ...     result = torch.compile(model)(x)
        >>> assert torch.equal(result, model(x))
    """

    def __init__(self, when: When = "late") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if when not in ("early", "late", "apart"):
            raise UsageError(f"collectives cannot complete {when!r}", "use early, late or apart")
        self.when = when
        self._flights: list[_Flight] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Code that torch.compile makes runs under this mode; it would run eagerly instead under one that says no here."""
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            self._land(len(self._flights))
        self._flights.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "_c10d_functional":
            return func(*args, **kwargs)
        base = func._schema.name.partition("::")[2]
        if base == "wait_tensor":
            self._wait(args[0])
            return args[0]
        if base.startswith("_"):
            return func(*args, **kwargs)
        return self._start(func, base, args, kwargs)

    def _start(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        several = isinstance(args[0], (list, tuple))
        given = list(args[0]) if several else [args[0]]
        plain = _plain(func, base)

        def perform(operands: list[Tensor]) -> list[Tensor]:
            first = operands if several else operands[0]
            found = plain(first, *args[1:], **{k: v for k, v in kwargs.items() if k != "out"})
            return [torch.ops._c10d_functional.wait_tensor(one) for one in (found if several else [found])]

        if "out" in kwargs:
            results = [kwargs["out"]]
        elif base.endswith("_"):
            results = given
        else:
            shaped = pytree.tree_map_only(Tensor, lambda x: x.to("meta"), (list(args), kwargs))
            with torch.utils._python_dispatch._disable_current_modes():
                made = func(*shaped[0], **shaped[1])
            results = [torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=given[0].device) for m in
                       (made if several else [made])]  # fmt: skip
        operands = given if self.when == "late" else [x.clone() for x in given]
        self._flights.append(_Flight(perform, operands, results))
        if self.when == "early":
            self._land(len(self._flights))
        elif self.when == "apart" or not (base.endswith("_") or ("out" in kwargs and _overlap(given, results))):
            for one in results:
                _poison(one)
        return results if several else results[0]

    def _wait(self, tensor: Tensor) -> None:
        last = max((n for n, one in enumerate(self._flights) if _overlap([tensor], one.results)), default=-1)
        self._land(last + 1)

    def _land(self, number: int) -> None:
        """Carry out the first collectives in flight."""
        landing, self._flights[:] = self._flights[:number], self._flights[number:]
        with torch.no_grad(), contextlib.ExitStack() as stack:
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
            for one in landing:
                for result, value in zip(one.results, one.perform(one.operands), strict=True):
                    result.copy_(value)


def _plain(func: Any, base: str) -> Any:
    """The form of a collective that makes the tensors it writes."""
    name = base.removesuffix("_out").removesuffix("_")
    return getattr(torch.ops._c10d_functional, name).default if name != base else func


def _overlap(some: list[Tensor], others: list[Tensor]) -> bool:
    storages = {one.untyped_storage()._cdata for one in others}
    return any(one.untyped_storage()._cdata in storages for one in some)


def _poison(value: Tensor) -> None:
    if value.is_floating_point() or value.is_complex():
        value.fill_(float("nan"))
    elif value.dtype is torch.bool:
        value.fill_(True)
    else:
        value.fill_(torch.iinfo(value.dtype).max)


__all__ = ["Completion", "When"]
