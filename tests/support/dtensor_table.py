"""What DTensor and the project make of the same transitions, as the tables of docs/resharding.md."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

from tcverify.application import Pair, apply_pass, load_pass
from tcverify.errors import ProgramError
from tcverify.execution import Lockstep
from tcverify.program import Program
from tests.support.dtensor_oracle import Outcome, Transition, run_dtensor

PAGE = Path(__file__).parents[2] / "docs" / "resharding.md"
BEGIN, END = "<!-- made by benchmarks/dtensor.py: begin -->", "<!-- end -->"

#: DTensor's plans are those of a version of torch.
VERSION = f"torch {'.'.join(torch.__version__.split('.')[:2])}"

ASCENDING = ["[0, 1]", "[1, 3]", "[0, 2, 3]", "[0, 1, 2, 3]"]
PERMUTED = ["[1, 0]", "[3, 1]", "[2, 3, 0]", "[2, 0, 1, 3]"]
SQUARES = ["[[0, 1], [2, 3]]", "[[0, 2], [1, 3]]"]
TURNED = ["[[3, 1], [0, 2]]"]

SINGLE = [((s,), (t,)) for s in ("R", "S0", "S1", "P") for t in ("R", "S0", "S1")]


def _possible(placements: Sequence[str]) -> bool:
    kept = [p for p in placements if p != "R"]
    return len(set(kept)) == len(kept)


PAIRS = [
    (s, t)
    for s in itertools.product(("R", "S0", "S1", "P"), repeat=2)
    for t in itertools.product(("R", "S0", "S1"), repeat=2)
    if _possible(s) and _possible(t)
]
SAME_MESH = [
    *(Transition(mesh, s, t) for mesh in ASCENDING + PERMUTED for s, t in SINGLE),
    *(Transition(mesh, s, t) for mesh in SQUARES + TURNED for s, t in PAIRS),
]
ACROSS = [
    Transition("[0]", ("R",), ("S0",), "[0, 1]"),
    Transition("[0]", ("R",), ("R",), "[1, 2, 3]"),
    Transition("[0, 1]", ("S0",), ("R",), "[2, 3]"),
    Transition("[0, 1]", ("S0",), ("S0",), "[2, 3]"),
    Transition("[0, 1]", ("P",), ("R",), "[2]"),
]
ALONE = [
    Transition("[0, 1]", ("S0",), ("R",), rows=5),
    Transition("[[0, 1], [2, 3]]", ("S0", "S1"), ("S0", "S0")),
]


def ascending(mesh: str) -> str:
    """The mesh of ranks 0, 1, … of the same shape."""
    shape = torch.tensor(json.loads(mesh)).shape
    return str(torch.arange(shape.numel()).reshape(shape).tolist())


def lower(program: Program) -> Pair:
    """The program with every `set` and `reduce` lowered."""
    pair = apply_pass(load_pass("tcverify.passes.resharding.host_program:HostProgram"), program)
    if pair.failure is not None:
        raise RuntimeError(pair.failure.message)
    return pair


@cache
def lowered(transition: Transition) -> Pair:
    """The program of a transition, lowered."""
    return lower(transition.program())


@cache
def meant(transition: Transition) -> dict[int, torch.Tensor]:
    """What each rank holds in the end, by what `set` and `reduce` mean."""
    return outputs(transition.program())


def outputs(program: Program) -> dict[int, torch.Tensor]:
    """What each rank holds in the end, in lockstep."""
    run = Lockstep().run(program)
    assert run.finished, run.why
    return {result.rank: result.outputs[0] for result in run.ranks if result.outputs}


def same(a: dict[int, torch.Tensor], b: dict[int, torch.Tensor]) -> bool:
    """Whether the same ranks hold the same."""
    return a.keys() == b.keys() and all(torch.equal(a[rank], b[rank].double()) for rank in a)


def communications(program: Program) -> str:
    """Names of the communications, each as often as on the rank that has most of it; "local" for none."""
    quiet = {"wait", "deallocate", "current_stream", "stream", "set_current_stream", "synchronize"}
    best: Counter[str] = Counter()
    for rank in range(program.world_size):
        names = [
            node.target._opname
            for node in program.graph(rank).nodes
            if node.op == "call_function" and node.target.namespace == "host_ir"
        ]
        best |= Counter(name for name in names if name not in quiet)
    return _counted(best)


def _counted(found: Counter[str] | dict[str, int]) -> str:
    return " + ".join(name if times == 1 else f"{times} × {name}" for name, times in sorted(found.items())) or "local"


@cache
def here(transition: Transition) -> tuple[str, dict[int, torch.Tensor] | None]:
    """What the project makes of a transition: communications or why there are none, and what ranks hold."""
    try:
        pair = lowered(transition)
    except ProgramError as error:
        return f"refused: {_short(error.message)}", None
    if pair.declined is not None:
        return f"declined: {_short(pair.declined)}", meant(transition)
    made = pair.rewritten or pair.original
    return communications(made), outputs(made)


#: Short forms of refusals, by words of theirs.
REASONS = {
    "cannot divide size": "uneven parts",
    "divides a tensor dim over two mesh dims": "a dim over two mesh dims",
    "changes 2 dims of mesh": "two mesh dims change",
    "inner": "inner resharding",
}


def _short(message: str) -> str:
    """Why, without the names of the case."""
    return next((short for words, short in REASONS.items() if words in message), message)


def table(outcomes: dict[Transition, Outcome]) -> str:
    """The tables as Markdown."""
    lines = [f"Made with {VERSION}. One mesh dim, on meshes of 2, 3 and 4 ranks:", ""]
    lines += [
        "| transition | DTensor | here | ranks hold the same | where mesh ranks do not ascend |",
        "|---|---|---|---|---|",
    ]
    for s, t in SINGLE:
        rows = [Transition(mesh, s, t) for mesh in ASCENDING]
        turned = [Transition(mesh, s, t) for mesh in PERMUTED]
        lines.append(
            f"| {rows[0]} | {_one(_theirs(outcomes[r]) for r in rows)} | {_one(here(r)[0] for r in rows + turned)} | "
            f"{_agreement(rows, outcomes)} | {_agreement(turned, outcomes)} |"
        )
    lines += ["", f"Two mesh dims of two ranks, the {len(PAIRS)} transitions by what they take:", ""]
    lines += ["| DTensor | here | transitions | ranks hold the same | for example |", "|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[Transition]] = {}
    for s, t in PAIRS:
        rows = [Transition(mesh, s, t) for mesh in SQUARES]
        key = _one(_theirs(outcomes[r]) for r in rows), _one(here(r)[0] for r in rows)
        groups.setdefault(key, []).extend(rows)
    for (theirs, ours), found in sorted(groups.items()):
        lines.append(
            f"| {theirs} | {ours} | {len(found) // len(SQUARES)} | {_agreement(found, outcomes)} | {found[0]} |"
        )
    lines += ["", "One of the two alone:", "", "| transition | DTensor | here |", "|---|---|---|"]
    for t in ACROSS:
        moved = outcomes[t].error is not None or same(here(t)[1] or {}, outcomes[t].results)
        theirs = _theirs(outcomes[t]) if moved else "nothing moves, and no error"
        lines.append(f"| {t.mesh} {t.source[0]} → {t.onto} {t.target[0]} | {theirs} | {here(t)[0]} |")
    uneven, nested = ALONE
    lines.append(f"| {uneven}, 5 rows on 2 ranks | {_theirs(outcomes[uneven])} | {here(uneven)[0]} |")
    lines.append(f"| {nested} | {_theirs(outcomes[nested])} | {here(nested)[0]} |")
    return "\n".join(lines)


def _theirs(outcome: Outcome) -> str:
    return outcome.error.split(":")[0] if outcome.error is not None else _counted(outcome.collectives)


def _one(found: Iterable[str]) -> str:
    """What all have in common, or all that there is."""
    return " or ".join(dict.fromkeys(found))


def _agreement(transitions: Sequence[Transition], outcomes: dict[Transition, Outcome]) -> str:
    agreeing = [same(here(t)[1] or {}, outcomes[t].results) for t in transitions]
    return "yes" if all(agreeing) else f"no, in {agreeing.count(False)} of {len(agreeing)}"


def run_all() -> dict[Transition, Outcome]:
    """What DTensor makes of all transitions."""
    transitions = [*SAME_MESH, *ACROSS, *ALONE]
    return dict(zip(transitions, run_dtensor(transitions), strict=True))


def checked_in() -> str:
    """The tables in the page."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


def with_table(text: str, table: str) -> str:
    """The page with other tables."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END, 1)[1]}"
