"""Aimed programs: a pattern of sequence parallelism up to some element, and an unusual change there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tcverify.ops import ShapeError
from tcverify.program import PARTIAL, VARYING, Mesh, Program, Recipe, shard
from tcverify.strategies.choices import HEADER_WIDTH, TransformerSetting, decode_choices, weighted_table
from tcverify.strategies.draft import DraftGroup, DraftValue, NoSite, TokenLayout, fork
from tcverify.strategies.transformer.mutations import MUTATIONS
from tcverify.strategies.transformer.near_miss import KINDS, mutate
from tcverify.strategies.transformer.programs import begin_program, finish_program
from tcverify.strategies.transformer.sites import (
    ADD,
    ADD_RMS_NORM,
    ADD_RMS_NORM2,
    MARKERS,
    call,
    gain,
    gather,
    norm,
    reduce,
)
from tcverify.strategies.transformer.twists import TWISTS
from tcverify.strategies.transformer.writing import TransformerWriter, activation, cast, layout_of, projection, relayout

#: Patterns by name, as the elements that follow a pending sum and a residual; the simplest first.
PATTERNS: dict[str, tuple[str, ...]] = {
    "P1": ("reduce", "norm"),
    "P1-fused": ("reduce", "add-norm"),
    "P1-region": ("reduce", "begin", "norm"),
    "P1-view": ("reduce", "view", "add-norm"),
    "P2": ("reduce", "norm2"),
    "P2-region": ("reduce", "begin", "norm2"),
    "P2-P2": ("reduce", "norm2", "mlp", "reduce", "norm2"),
    "P3": ("reduce", "add", "norm"),
    "P3-copy": ("reduce", "add", "end", "copy", "norm"),
    "P2-P3": ("reduce", "norm2", "mlp", "reduce", "add", "norm"),
    "P2-P3-view": ("reduce", "norm2", "mlp", "reduce", "view", "add", "end", "copy", "norm"),
    "P2-P3-fused": ("reduce", "norm2", "mlp", "reduce", "add-norm"),
    "P3-P3": ("reduce", "add", "norm", "mlp", "reduce", "add", "copy", "norm"),
    "P2-P2-P3": ("reduce", "norm2", "mlp", "reduce", "norm2", "mlp", "reduce", "add", "end", "norm"),
}


@dataclass(frozen=True, slots=True)
class Aim:
    """The choices of an aimed program; see `FIELDS` for the values.

    Attributes:
        pattern: which.
        twist, how: the twist and how it is done.
        stop: before which element the twist stands.
        after: what follows the twist: the rest of the pattern, the rest without its next element, or nothing.
        residual: what the residual is at first.
        swapped: whether the residual stands in the first slot.
        keep: whether the residual is returned.
        second, second_where, second_how: a mutation of the whole, as of near misses.
    """

    pattern: str
    twist: str
    how: int
    stop: int
    after: str
    residual: str
    swapped: bool
    keep: bool
    second: str
    second_where: int
    second_how: int


_BYTE = tuple(range(256))

FIELDS: dict[str, tuple[object, ...]] = {
    "pattern": tuple(PATTERNS),
    "twist": ("none", *TWISTS),
    "how": _BYTE,
    "stop": _BYTE,
    "after": weighted_table(("rest", 4), ("skip", 2), ("nothing", 1)),
    "residual": weighted_table(("input", 4), ("gathered", 1), ("reduced", 1), ("varying", 1)),
    "swapped": (False, True),
    "keep": weighted_table((False, 3), (True, 1)),
    "second": ("none", "none", *(kind if kind in MUTATIONS else "none" for kind in KINDS)),
    "second_where": _BYTE,
    "second_how": _BYTE,
}

#: Bytes of a whole program: a header as of structured programs, and the fields.
WIDTH = HEADER_WIDTH + len(FIELDS)


def decode_aimed(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into an aimed program."""
    choices = choices.ljust(WIDTH, b"\0")
    setting, _ = decode_choices(choices[:HEADER_WIDTH])
    values = [table[byte % len(table)] for table, byte in zip(FIELDS.values(), choices[HEADER_WIDTH:], strict=False)]
    return aim_at(mesh, setting, Aim(*values))  # type: ignore[arg-type]


def aim_at(mesh: Mesh, setting: TransformerSetting, aim: Aim) -> Program:
    """Write an aimed program. Parts that do not fit together are left out."""
    w = begin_program(mesh, replace(setting, degenerate=None))
    _start(w, aim)
    elements = PATTERNS[aim.pattern]
    stop = aim.stop % (len(elements) + 1)
    w = _grow(w, elements[:stop], aim)
    labels = ["aimed", aim.pattern]
    if aim.twist != "none":
        twisted = _tried(w, aim.twist, lambda trial: TWISTS[aim.twist](trial, aim.how))
        if twisted is not None:
            w = twisted
            labels.append(aim.twist)
    rest = {"rest": elements[stop:], "skip": elements[stop + 1 :], "nothing": ()}[aim.after]
    w = _grow(w, rest, aim)
    if aim.keep:
        w.extras.append(w.residual)
    if aim.second != "none":
        w = mutate(w, aim.second, aim.second_where, aim.second_how)
    return finish_program(w, *labels)


def _start(w: TransformerWriter, aim: Aim) -> None:
    """Add the pending sum and the residual."""
    s, main = w.setting, w.roles.main
    layout = layout_of(w, "sb" if s.layout == "sbh" else "bs", s.layout == "flat")
    w.hidden = activation(w, "partial", layout, (main, PARTIAL), w.dtype, w.partial)
    shape = w.draft.shape(w.hidden)
    if aim.residual == "varying":
        residual = activation(w, "residual", layout, (main, VARYING), w.dtype, Recipe())
    elif aim.residual == "reduced":
        residual = reduce(w, activation(w, "partial", layout, (main, PARTIAL), w.dtype, w.partial), DraftGroup(main))
    elif aim.residual == "gathered" and shape is not None and _divides(w, shape[-2]):
        declared = w.roles.declared([(main, shard(len(shape) - 2))])
        part = w.draft.input("residual", shape, w.dtype, declared, Recipe(), layout)
        residual = gather(w, part, len(shape) - 2, DraftGroup(main))
    else:
        residual = activation(w, "residual", layout, None, w.dtype, Recipe())
    w.residual = w.first = replace(residual, layout=layout)


def _divides(w: TransformerWriter, tokens: int) -> bool:
    return all(tokens % size == 0 for size in w.roles.sizes(w.roles.main))


def _grow(w: TransformerWriter, elements: tuple[str, ...], aim: Aim) -> TransformerWriter:
    """Write elements of a pattern, except those that do not fit."""
    for name in elements:
        grown = _tried(w, "", lambda trial, name=name: _element(trial, name, aim.swapped))  # type: ignore[misc]
        w = grown or w
    return w


def _tried(w: TransformerWriter, label: str, change: Callable[[TransformerWriter], None]) -> TransformerWriter | None:
    """Return the program with a change; None where it does not fit."""
    trial = fork(w)
    trial.draft.scope = (label,) if label else ()
    try:
        change(trial)
        trial.draft.check([trial.hidden, trial.residual, *trial.extras])
    except (NoSite, ShapeError):
        return None
    trial.draft.scope = ()
    return trial


def _element(w: TransformerWriter, name: str, swapped: bool) -> None:
    h, r = w.hidden, w.residual
    first, second = (r, h) if swapped else (h, r)
    if name == "reduce":
        w.hidden = reduce(w, h, DraftGroup(w.roles.main))
    elif name == "norm":
        w.hidden = norm(w, h)
    elif name == "add-norm":
        w.hidden = call(w, ADD_RMS_NORM, first, second, gain(w, h), w.setting.eps)
    elif name == "norm2":
        both = call(w, ADD_RMS_NORM2, first, second, gain(w, h), w.setting.eps)
        w.hidden, w.residual = (w.draft.item(both, index) for index in (0, 1))
    elif name == "add":
        w.hidden = w.residual = call(w, ADD, first, second)
    elif name == "view":
        to = TokenLayout(h.layout.order, not h.layout.flat)
        w.hidden = relayout(w, h, to, w.setting.hidden)
        if w.batch > 1:  # else they broadcast
            w.residual = relayout(w, r, to, w.setting.hidden)
    elif name == "mlp":
        w.hidden = _mlp(w, h)
    else:
        w.hidden = call(w, MARKERS[("begin", "end", "copy").index(name)], h, w.region())
    w.hidden = replace(w.hidden, layout=w.hidden.layout if name == "view" else h.layout)


def _mlp(w: TransformerWriter, value: DraftValue) -> DraftValue:
    """Two products around an activation, column- and row-parallel: a pending sum again."""
    main, hidden = w.roles.main, w.setting.hidden
    width = 2 * w.roles.multiple(main)
    value = cast(w, value, w.dtype)
    up = call(w, "aten::matmul", value, projection(w, value, "wup", (hidden, width), (main, shard(1)), False))
    made = replace(call(w, "tensor_cast::gelu", up), rms=0.25)
    return call(w, "aten::matmul", made, projection(w, made, "wdown", (width, hidden), (main, shard(0)), False))
