"""The terms that messages, reports and pages of documentation use."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Meanings by term; a term may be several words, separated by commas.
GLOSSARY: dict[str, str] = {
    "anchor": (
        "a node of a lowered graph that sets the stream of the next op, or what that op waits for. Markers "
        "for streams, records and waits are anchors."
    ),
    "arena": (
        "the memory of one rank that contains its communication buffers. The equivalence check runs the "
        "program with its buffers in one, since overlaps show only there."
    ),
    "aside, not applicable": (
        "the exact or native domain cannot model this program. The verdict then rests on `float64` alone, and"
        " a note says so."
    ),
    "baseline": (
        "a file of known findings, which do not fail a run. `--write-baseline` adds the current findings to it."
    ),
    "behaviour": (
        "what a pass did to a program, in short: which lines ran, and which ops were removed and added. The "
        "search keeps one program per behaviour."
    ),
    "blame, root cause": (
        "the smallest set of the pass's rewrites without which the finding disappears. `--bisect` determines it."
    ),
    "campaign": (
        "the verification of one pass on one mesh: programs are drawn until the number of programs or the "
        "time is used up. A run consists of campaigns."
    ),
    "case": (
        "a counterexample as a folder: program, pass, finding, report and script. Its id is a hash of "
        "program, pass and kind of finding."
    ),
    "changed": (
        "of a program: the pass changed the graph of at least one rank. A pass that changes no program is not tested."
    ),
    "check": "a function that judges what was observed and returns findings.",
    "communicator": (
        "the ordered list of ranks that take part in a collective. Collectives of one communicator must be "
        "issued in the same order on all its ranks."
    ),
    "condition": (
        "a fact about inputs on which a correct rewrite depends, such as being equal on all ranks of a group."
        " If the placement of the input is unknown, the verdict is inconclusive and names the condition."
    ),
    "confirm": "run on a process group what lockstep does not refute. Both must agree.",
    "contract": (
        "what a pass promises besides preserving the meaning, such as an order of collectives or a bound on "
        "peak memory. A broken promise is a finding."
    ),
    "corpus": "programs worth trying again, kept between runs. Machines may share its directory.",
    "counterexample": (
        "a program on which a pass is refuted, shrunk as far as the finding allows. It is saved as a case."
    ),
    "coverage": (
        "the lines of the pass that ran, and the outcomes of its conditions, over all programs of a run. "
        "Lines that never ran were not verified."
    ),
    "decline": (
        "a pass refuses a program by raising `tcverify.Unsupported`. The program is counted, but refutes nothing."
    ),
    "divergence": (
        "the first node of the rewritten graph whose value the original does not explain. The cause is at "
        "this node or in what it reads."
    ),
    "doubt": "the reason why a program could not be judged. It makes a verdict inconclusive.",
    "draw": "generate at random, from a seed. The same seed draws the same programs.",
    "edit": "a small change of a kernel, by which the search creates its next program.",
    "evidence": (
        "the observations on which checks base their findings, such as runs of both versions. Each kind is "
        "collected only if a check needs it."
    ),
    "exact": (
        "the number domain in which all values are residues modulo a prime. Without rounding, differences of "
        "any size show."
    ),
    "executor": "what runs programs: lockstep, a process group (gloo or NCCL, on CPUs or GPUs), or streams, simulated or real.",
    "exposed communication": (
        "the time during which communication is in flight and nothing computes. Passes that reorder for "
        "overlap try to reduce it."
    ),
    "extreme": (
        "an execution in which collectives read and write as early, or as late, as they may. A program "
        "without races computes the same in each."
    ),
    "finding": "a defect, with its kind, node and rank. One finding refutes the program, unless it is hygiene.",
    "fingerprint": "what findings with the same cause have in common. Baselines recognise findings by it.",
    "global view": "a program written on whole tensors with layouts. The graph of each rank is derived from it.",
    "group": (
        "the ranks along one dim of a mesh, in order. The position in the group, not the rank number, selects a shard."
    ),
    "host IR": "the actions of one rank's host: streams, communications and waits, as in nvFuser.",
    "hygiene": (
        "findings that harm only a later step which relies on them, such as wrong metadata. They do not "
        "refute a pass, unless `--strict` is set."
    ),
    "ill-conditioned": (
        "of a value: tiny perturbations change it so much that rounding cannot be told from a defect. Such a "
        "program is inconclusive."
    ),
    "in flight": (
        "of an asynchronous collective: started, and not waited for. Until the wait it may read its operands, "
        "unless it has copied them, and write its result at any time."
    ),
    "inconclusive": "of a verdict: there is a doubt and no finding. An inconclusive program never counts as passed.",
    "kernel": "the smallest program on which the pass shows one particular behaviour. It is unrelated to GPU kernels.",
    "kind": "the category of a finding, such as `wrong-value` or `deadlock`.",
    "known": "of a finding: it is in the baseline.",
    "law": (
        "a property of an op of which only the signature is known, such as being computed row by row. Users "
        "declare it with `--op-law`."
    ),
    "layout": "the placements of a tensor on all dims of a mesh.",
    "lockstep": (
        "the execution of all ranks in one process. Each rank runs up to its next collective, which completes"
        " when all members have arrived."
    ),
    "lowered": "of a graph: it contains streams, records and waits for events.",
    "makespan": "the time from the start of the first op of a schedule to the end of the last one.",
    "meaning": ("what an op computes, as defined in a dialect. An op without a meaning makes a program inconclusive."),
    "mesh": "the ranks as a grid with named dims, such as `dp` and `tp`.",
    "mutant": "a built-in pass with a planted defect. Tests make sure that each is refuted.",
    "native": (
        "the number domain in which programs run in their own dtypes. The error of the rewritten program may "
        "exceed that of the original only as far as rounding explains."
    ),
    "near miss": (
        "a program that violates one condition of a pattern of the pass. A pass that rewrites it anyway is "
        "usually wrong."
    ),
    "note": "a remark of a verdict that does not change its status, for instance that another number domain decided.",
    "nothing tested": "the result of a run in which no program passed, or the pass changed none. It fails the run.",
    "number domain": (
        "the numbers in which programs run: `float64`, `native` (the dtypes of the program) or `exact` (a prime field)."
    ),
    "original": "the program before the pass.",
    "outcome": (
        "true or false, of a condition in the source of the pass. Coverage counts both outcomes of each condition."
    ),
    "pass": "a function that rewrites a `torch.fx` graph module: `gm -> gm`, or in place.",
    "passed": "of a verdict: all checks ran without a finding or a doubt.",
    "pattern": (
        "what a pass searches for in a graph in order to rewrite it. Built-in passes count their rewrites per"
        " pattern, such as `P1`."
    ),
    "pipeline": (
        "several passes that run one after the other and are verified as one pass: `first+second`. Findings "
        "name the faulty stage."
    ),
    "placement": (
        "how a tensor is distributed over a group: replicated (equal on all ranks), shard(d) (each rank has a"
        " part of dim d), partial (the tensor is the sum over the ranks), varying (unrelated values) or "
        "unknown (not declared; drawn as varying)."
    ),
    "planted fault": "a small mistake in tcverify itself, which some test must detect.",
    "poison": (
        "NaN, or a wrong integer, in memory that no op has written yet. An op that reads it too early "
        "computes a visibly wrong value."
    ),
    "program": "what all ranks run: a graph per rank, a mesh, inputs and their placements.",
    "race": "two accesses to one storage, at least one of them a write, whose order nothing guarantees.",
    "rank": "one process of the distributed program.",
    "rank constant": "an integer in a shared graph that differs between ranks, such as the start of a slice.",
    "refuted": "of a verdict: there is at least one finding.",
    "relation": (
        "how a value of the rewritten program relates to one of the original: equal, a shard of it, an "
        "addend, a multiple, or unrelated."
    ),
    "replay": (
        "the verification of a saved case with the current version of the pass. Of streams: the computation "
        "of a schedule's times from the graph."
    ),
    "residue": "a value of the exact domain: an integer modulo a prime.",
    "rewritten": "of a program or graph: after the pass.",
    "rounding error, probe": (
        "the largest change of an output of the original when the results of its ops, and what ranks add up, are perturbed "
        "in their last bits. "
        "A difference of many times the rounding error is a defect."
    ),
    "scale": "the largest magnitude of an output. Rounding errors are compared with it.",
    "scaled-down program": (
        "a program with small sizes in place of its real ones, and the same meaning. Large programs are judged on it."
    ),
    "search": (
        "the generation of new programs from earlier ones that made the pass do something new. `--draw` turns it off."
    ),
    "shrink": (
        "make a counterexample smaller as long as the finding remains: fewer nodes, inputs and ranks, smaller"
        " sizes, simpler values."
    ),
    "stacked": "lockstep with the tensors of all ranks in one tensor, so that an op runs once for all of them.",
    "start, wait": "an asynchronous collective begins at its start. Its result may be read after its wait.",
    "strategy": "a generator of programs. `--strategy` selects one or several.",
    "subject": "a pass of PyTorch that tcverify knows by name: `torch:…`.",
    "token": "what a record of a stream returns and a wait takes: the completion of an op.",
    "vacuity": (
        "the condition nothing tested in `--fail-on`: no program passed, or the pass changed none. `--fail-on"
        " refuted,vacuity` ignores inconclusive programs, but not this."
    ),
    "verdict": (
        "the result for a program or a run: passed, refuted (a finding) or inconclusive (a doubt, no "
        "finding). A run can also be nothing tested."
    ),
    "world size": "the number of ranks of a program.",
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
            name = term.lower().replace("-", " ")
            if wanted.replace("-", " ") in (name, f"{name}s", f"{name}es"):
                return meaning
    return None


__all__ = ["GLOSSARY", "explained", "terms", "terms_in"]
