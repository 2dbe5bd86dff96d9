"""What an op means: how it computes, what it communicates, and what it writes into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from tcverify.errors import UnsupportedOp
from tcverify.ops.collective import Collective

#: Namespaces of torch's own ops, which need no table: they run as they are.
TORCH = frozenset({"aten", "prims"})


@dataclass(frozen=True, slots=True)
class Request:
    """What a rank asks for when it meets a collective: the call and its contribution."""

    collective: Collective
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Start:
    """A rank's request for an asynchronous collective: the call, its contribution, and where the result goes.

    Until an op that waits for `output` has run, the contribution may be read, and the output written, at any time. A rank
    continues at once; an op that has started only returns its output, or views of it. If the contribution is `copied`, it is
    read at once: what is in flight is the copy.
    """

    collective: Collective
    tensor: torch.Tensor
    output: torch.Tensor
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Await:
    """What a rank asks for when it waits: the end of all collectives that were to write into the storage of a tensor."""

    tensor: torch.Tensor


#: Which half of an asynchronous collective an op is.
Phase: TypeAlias = Literal["start", "wait"]


@dataclass(frozen=True, slots=True)
class Op:
    """The meaning of an op.

    Attributes:
        name: qualified name, e.g. "tensor_cast::rms_norm" or "aten::add.Tensor".
        run: for a local op, computes the result from the arguments; None if the op has no meaning here.
        collective: whether `run` is a generator function: the executing rank is its first argument; it yields `Request`, `Start`
            or `Await`, and is sent the result (None for `Start` and `Await`).
        aliases: whether a result may share storage with an argument, or an argument is mutated.
        identity: whether the result always equals the first argument.
        native: as `run`, in the dtypes of the program, with the internal precision and the result dtype of the op's kernels;
            None if torch's own rules give that.
        group: name of the argument that names a group, of ops that do so; `run` is given a `Group` in its place.
        sized: whether the shape of the result depends on how many ranks that group has; then `fake` is given a `Group` too.
        phase: "start" of an asynchronous collective, "wait" for it, or None. A start reads its operands, and writes its result
            or what it writes into, at any time until its wait.
        copies: of a start, whether it copies its operands before it returns (its `Start`s are `copied`): they may be written, or
            freed, at once.
        effect: whether it has effects beyond its result and operands: it keeps its order relative to all communication, and is
            kept even if its result is unused.
        schema: the signature with the op's real writes and aliases, if torch's own does not declare them.
        resources: what it occupies while it runs, of "compute" and "comm"; fused ops that compute and communicate take both.
        reason: why the op is not supported, if `run` is None.
        uninterpreted: whether nothing but the signature is known, for some arguments at least, and `run` is some function of
            that signature; see `tcverify.ops.uninterpreted`.
        signature: "(Tensor x) -> Tensor", as torch writes it. Where it is given, an op that another library defines under
            this name must agree with it, or has no meaning.
        fake: computes shape, stride and dtype of the result from (fake, meta or real) tensors, as positional arguments in
            the order of `signature`; None leaves that to the op as torch has it.
    """

    name: str
    run: Callable[..., Any] | None
    collective: bool = False
    aliases: bool = False
    identity: bool = False
    reason: str = ""
    signature: str = ""
    fake: Callable[..., Any] | None = None
    resources: tuple[str, ...] = ("compute",)
    native: Callable[..., Any] | None = None
    group: str | None = None
    sized: bool = False
    phase: Phase | None = None
    copies: bool = False
    effect: bool = False
    schema: str = ""
    uninterpreted: bool = False

    def require(self) -> Callable[..., Any]:
        """Return `run`, or raise `UnsupportedOp` with the reason."""
        if self.run is None:
            raise UnsupportedOp(self.name, self.reason)
        return self.run


#: Returns what a `call_function` target means; see `tcverify.ops.table.lookup`.
Lookup: TypeAlias = Callable[[Any], Op]

__all__ = ["TORCH", "Await", "Lookup", "Op", "Phase", "Request", "Start"]
