"""The terms that messages, reports and pages of documentation use."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Meanings by term; a term may be several words, separated by commas.
GLOSSARY: dict[str, str] = {
    "anchor": "a node of a lowered graph that sets the stream of the next op, or what that op waits for",
    "baseline": "a file of known findings, which do not fail a run",
    "behaviour": "what a pass did to a program, in short: which lines ran, which ops were removed and added",
    "case": "a counterexample as a folder: program, pass, finding, report, script",
    "check": "a function that judges what was observed and returns findings",
    "confirm": "run on a process group what lockstep does not refute; both must agree",
    "contract": (
        "what a pass promises beyond preserving the meaning, such as an order of collectives or a peak of memory"
    ),
    "corpus": "programs worth trying again, kept between runs and shared by machines",
    "divergence": "the first node whose value the original does not explain",
    "doubt": "the reason why a program could not be judged",
    "edit": "a small change of a kernel, by which the search creates its next program",
    "executor": "what runs programs: lockstep, a process group (gloo or NCCL), simulated streams",
    "extreme": "an execution in which collectives read and write as early, or as late, as they may",
    "finding": "a defect, with its kind, node and rank; one finding refutes the program, unless it is hygiene",
    "fingerprint": "what findings with the same cause have in common",
    "global view": "a program written on whole tensors with layouts, from which each rank's graph is derived",
    "host IR": "the actions of one rank's host: streams, communications, waits, as in nvFuser",
    "hygiene": (
        "findings that harm only a later step which relies on them, such as wrong metadata; they do not refute a pass"
    ),
    "kernel": "the smallest program on which the pass shows one particular behaviour",
    "layout": "the placements of a tensor on all dims of a mesh",
    "lockstep": (
        "the execution of all ranks in one process, each up to its next collective, which completes when all "
        "members have arrived"
    ),
    "lowered": "of a graph: it contains streams, records and waits for events",
    "mesh, group": "the ranks as a grid with named dims; a group is the ranks along one dim, in order",
    "mutant": "a built-in pass with a planted defect",
    "near miss": "a program that violates one condition of a pattern of the pass",
    "number domain": (
        "the numbers that programs run in: `float64`, `native` (the dtypes of the program), `exact` (a prime field)"
    ),
    "original, rewritten": "the program before and after the pass",
    "pass": "a function that rewrites a `torch.fx` graph module: `gm -> gm`, or in place",
    "placement": (
        "how a tensor is distributed over a group: replicated (equal on all ranks), shard(d) (each rank has a"
        " part of dim d), partial (the tensor is the sum over the ranks), or varying (unknown)"
    ),
    "planted fault": "a small mistake in tcverify itself, which some test must detect",
    "program": "what all ranks run: a graph per rank, a mesh, inputs and their placements",
    "rank": "one process of the distributed program",
    "rank constant": "an integer in a shared graph that differs between ranks, such as the start of a slice",
    "relation": (
        "how a value of the rewritten program relates to one of the original: equal, a shard of it, an "
        "addend, a multiple"
    ),
    "stacked": "lockstep with the tensors of all ranks in one tensor, so that an op runs once for all of them",
    "start, wait": "an asynchronous collective begins at its start; its result may be read after its wait",
    "strategy": "a generator of programs",
    "subject": "a pass of PyTorch that tcverify knows by name: `torch:…`",
    "twin": "in the code: a scaled-down program with the same meaning as one of production size",
    "verdict": "passed, refuted (a finding) or inconclusive (a doubt, no finding); a run can also be nothing tested",
}


def terms() -> list[str]:
    """The terms, each by itself."""
    return [term for line in GLOSSARY for term in line.split(", ")]


def terms_in(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The terms that occur in texts, in their order, with their meanings."""
    text = " ".join(texts)
    return tuple(
        (line, meaning)
        for line, meaning in GLOSSARY.items()
        if any(re.search(rf"\b{term}(e?s)?\b", text, re.IGNORECASE) for term in line.split(", "))
    )


def explained(word: str) -> str | None:
    """The meaning of a term, in any case, singular or plural; None where the glossary has none."""
    wanted = word.strip().lower()
    for terms, meaning in GLOSSARY.items():
        for term in terms.split(", "):
            name = term.lower()
            if wanted.replace("-", " ") in (name, f"{name}s", f"{name}es"):
                return meaning
    return None


__all__ = ["GLOSSARY", "explained", "terms", "terms_in"]
