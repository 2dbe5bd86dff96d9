"""Long campaigns on PyTorch's own passes: what they covered and what they found, for the torch that runs this.

    python benchmarks/pytorch.py run [--minutes M] [--log FILE] [--cases DIR] [SUBJECT]...
    python benchmarks/pytorch.py summary LOG...
    python benchmarks/pytorch.py table LOG...
    python benchmarks/pytorch.py confirm [NAME]...

`run` gives every subject that this torch has (default: all) its turn: a campaign of --slice seconds on one of the numbers of
ranks that its strategy draws, with another seed each time, until the minutes are over. Half of the campaigns search, the others
only draw. The next subject is the one with the fewest campaigns in the log, so that runs with the same log reach all of them.
Findings are kept once per fingerprint in --cases, and known from then on; so are the kernels of a search, from which the next one
goes on. A line of JSON per campaign says what was drawn, changed, reached and found, which defects in reports/pytorch it met
(recognised as in benchmarks/recall.py), and what CPU time it took. The branches come from coverage.py: after a campaign, some of
its programs go through the pass again, in this process. `summary` adds up such lines per version and subject
(reports/pytorch/campaigns.ndjson is made so), `table` prints what they come to.
`confirm` tries the counterexamples of reports/pytorch (default: all) in PyTorch's public API, and prints the outcome of each.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
import torch
from recall import Known, defects_of, raising_statement

from tcverify.application import Guarded, load_pass
from tcverify.application.apply import apply_pass
from tcverify.campaign import Campaign, CampaignPlan
from tcverify.campaign.corpus import Corpus
from tcverify.campaign.events import CampaignFinished
from tcverify.campaign.search import search_of
from tcverify.cases.baseline import Baseline, read_baseline, write_baseline
from tcverify.cases.counterexample import Counterexample, read_counterexample
from tcverify.cases.end_to_end import EndToEndState
from tcverify.cases.fingerprint import fingerprint_of
from tcverify.errors import TcverifyError
from tcverify.program import Program
from tcverify.pytorch import PREFIX, SUBJECTS, TorchSubject, subject
from tcverify.pytorch.end_to_end import try_end_to_end
from tcverify.pytorch.findings import read_findings
from tcverify.registry.strategies import ALONE, world_sizes_of
from tcverify.report.markdown import table_cell
from tcverify.strategies import STRATEGIES, programs_of
from tcverify.strategies.options import with_options

VERSION = torch.__version__.split("+")[0]

REPORTS = Path(__file__).parents[1] / "reports" / "pytorch"

#: What an application may take. Campaigns share a machine with others, and a pass that is slow there hangs nowhere.
SECONDS = 60.0

#: Seconds to shrink a finding. A small counterexample tells the next programs that show the same, which a large one does not.
SHRINKING = 40.0

#: Programs of a campaign that are applied again to see what they reach.
WATCHED = 25

#: Strategies that every subject gets occasionally besides its own: they may show unforeseen defects.
OTHERS = ("traced", "functional", "compiled", "fsdp", "data-parallel", "sequence-functional", "async-tp")


@click.group()
def main() -> None:
    """Long campaigns on PyTorch's own passes."""


@main.command()
@click.argument("names", nargs=-1, metavar="[SUBJECT]...")
@click.option("--minutes", type=float, default=10.0, show_default=True)
@click.option("--slice", "seconds", type=float, default=300.0, show_default=True, help="Seconds per campaign.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the first campaign.")
@click.option("--log", type=click.Path(path_type=Path), default=Path("campaigns.ndjson"), show_default=True)
@click.option("--cases", type=click.Path(path_type=Path), default=Path("campaigns"), show_default=True)
def run(names: tuple[str, ...], minutes: float, seconds: float, seed: int, log: Path, cases: Path) -> None:
    """Run campaigns for this many minutes."""
    torch.set_num_threads(1)
    chosen = [subject(name) for name in names] or [one for one in SUBJECTS.values() if one.here]
    had = campaigns_in(log)
    stop = time.monotonic() + 60 * minutes
    while time.monotonic() < stop:
        one = min(chosen, key=lambda one: had[one.name])
        turn = seed + had[one.name]
        had[one.name] += 1
        record = campaign(one, turn, seconds, cases)
        with log.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
        found = {kind: len(keys) for kind, keys in record["new"].items()}
        counts = f"{record['programs']} programs, {record['changed']} changed, {record['refuted']} refuted"
        print(f"{one.name} seed {turn} ({record['strategy']}): {counts}, new {found}", flush=True)


def campaigns_in(log: Path) -> Counter[str]:
    """How many campaigns a log has of each subject in this version of torch."""
    lines = log.read_text().splitlines() if log.is_file() else []
    return Counter(one["subject"] for one in map(json.loads, lines) if one["torch"] == VERSION)


def campaign(one: TorchSubject, seed: int, seconds: float, cases: Path) -> dict[str, Any]:
    """Verify one subject for this many seconds, and return the result."""
    strategy = one.strategy if seed % 4 or one.strategy in ALONE else next_of(OTHERS, seed // 4, one.strategy)
    sizes = world_sizes_of([strategy])
    size = sizes[seed % len(sizes)]
    options: Counter[str] = Counter()
    watched: list[Program] = []

    def note(program: Program) -> Program:
        options.update(f"{name}={program.options.get(name, values[0])}" for name, values in one.draws.items())
        if len(watched) < WATCHED:
            watched.append(program)
        return program

    side = "draw" if strategy in ALONE else ("draw", "search")[(seed + seed // 4) % 2]
    before = cpu_seconds()
    finished, spent = verified(one, seed, seconds, strategy, size, cases, note, searched=side == "search")
    new: dict[str, list[str]] = defaultdict(list)
    for case in finished.counterexamples:
        new[case.finding.kind].append(case.id)
    reached = branches(one, watched)
    counts = finished.statistics
    return {
        "torch": VERSION,
        "python": "{}.{}".format(*sys.version_info),
        "subject": one.name,
        "strategy": strategy,
        "side": side,
        "ranks": size,
        "seed": seed,
        "programs": counts.programs,
        "changed": counts.changed,
        "passed": counts.passed,
        "refuted": counts.refuted + counts.known,
        "inconclusive": counts.inconclusive,
        "findings": dict(counts.findings),
        "doubts": dict(counts.doubts),
        "new": dict(new),
        "found": {side: defects_met(finished, one)},
        "options": dict(options),
        "features": dict(counts.labels),
        "branches": reached,
        "cpu_s": round(cpu_seconds() - before + spent, 1),
    }


def verified(
    one: TorchSubject,
    seed: int,
    seconds: float,
    strategy: str,
    size: int,
    cases: Path,
    note: Callable[[Program], Program],
    *,
    searched: bool,
) -> tuple[CampaignFinished, float]:
    """Run one campaign in lockstep.

    Returns:
        What it came to, and the CPU seconds of the processes of the pass that lived to the end: others have taken their count
        with them.
    """
    cases.mkdir(parents=True, exist_ok=True)
    path = cases / f"{one.name}.json"
    known = read_baseline(path) if path.is_file() else Baseline()
    programs = with_options(programs_of(strategy, None, size), one.draws).map(note)
    covered = [one.source.partition(":")[0]] if searched else None
    with Guarded(one.target, timeout=SECONDS, covered=covered) as guarded, tempfile.TemporaryDirectory() as state:
        plan = CampaignPlan(
            programs, f"{size} ranks", cases, Path(state), max_examples=None, max_time=seconds, seed=seed,
            shrink_time=SHRINKING, baseline=known, collect=True, earlier=False,
            corpus=Corpus(cases / "kernels", print) if searched else None,
            search=search_of(guarded, seed, None) if searched else None,
        )  # fmt: skip
        finished = Campaign(guarded, plan, None).run()
        spent = sum(map(cpu_seconds_of, guarded.pids))
    kept = known.with_cases(finished.counterexamples)
    names = {case.id: ", ".join(names_of(case, one)) for case in finished.counterexamples}
    write_baseline(Baseline(tuple(replace(e, reason=names.get(e.case, e.reason)) for e in kept.known)), path)
    return finished, spent


#: Passes that Inductor runs on graphs behind autograd.
_POST_GRAD = (
    "reinplace",
    "joint_graph_passes",
    "micro_pipeline_tp",
    "ddp_fusion",
    "bucket_collectives",
    "decomp_comms",
)

#: Subjects that run the passes of others, one after another, and these others.
PIPELINES: dict[str, tuple[str, ...]] = {
    "compile": ("post_grad_passes", *_POST_GRAD, *(name for name in SUBJECTS if name.startswith("comms."))),
    "post_grad_passes": _POST_GRAD,
    "default_partition": ("fx_graph_cse",),
    "min_cut_partition": ("fx_graph_cse",),
}


def names_of(case: Counterexample, one: TorchSubject) -> list[str]:
    """The defects in reports/pytorch that a counterexample shows: those of its subject and of the passes that this runs, and of
    others if the exception comes from the same statement, or if their facts list the fingerprint and they are of the same file of
    torch."""
    statement, shown = raising_statement(case), f"{case.finding.kind}: {fingerprint_of(case)}"
    file, runs = one.source.partition(":")[0], (one.name, *PIPELINES.get(one.name, ()))
    return [
        known.finding.folder.name
        for name, defects in known_defects().items()
        for known in defects
        if (name.removeprefix(PREFIX) in runs and known.shown_by(case))
        or (statement is not None and statement == known.raised_by)
        or (shown in known.finding.also and subject(name).source.partition(":")[0] == file)
    ]


@functools.cache
def known_defects() -> dict[str, list[Known]]:
    """The defects in reports/pytorch that this torch has, by subject: reading them takes seconds."""
    return defects_of(())


def defects_met(finished: CampaignFinished, one: TorchSubject) -> list[str]:
    """The defects in reports/pytorch that a campaign met, for the first time or again: a baseline has their names as reasons."""
    names = {name for case in finished.counterexamples for name in names_of(case, one)}
    return sorted(names | {name for entry, _ in finished.known for name in entry.reason.split(", ") if name})


def branches(one: TorchSubject, programs: list[Program]) -> dict[str, Any]:
    """Branches of the file that defines the subject that these programs reach, as numbers of the lines they lead from and to."""
    import coverage

    module = one.source.partition(":")[0]
    path = Path(torch.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    watch = coverage.Coverage(branch=True, data_file=None, include=[str(path)], config_file=False, messages=False)
    watch.start()
    try:
        loaded = load_pass(one.target)
        for program in programs:
            apply_pass(loaded, program)
    except TcverifyError:
        pass  # the campaign has said what is wrong
    finally:
        watch.stop()
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        try:
            watch.json_report(outfile=report.name)
        except coverage.exceptions.NoDataError:  # nothing of the file has run: every program was declined
            return {"reached": [], "all": 0}
        (found,) = json.loads(Path(report.name).read_text())["files"].values()
    reached, missing = found["executed_branches"], found["missing_branches"]
    return {"reached": reached, "all": len(reached) + len(missing)}


def next_of(names: tuple[str, ...], number: int, other: str) -> str:
    """One of the strategies that are not `other`."""
    left = [name for name in names if name != other and name in STRATEGIES]
    return left[number % len(left)]


def cpu_seconds() -> float:
    """CPU time of this process and of those that have ended under it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def cpu_seconds_of(pid: int) -> float:
    """CPU time of another process; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------------------------- adding up


def added(logs: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Add up the lines of logs: one record per version and subject, in order."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for log in logs:
        for line in log.read_text().splitlines():
            record = json.loads(line)
            rows[record["torch"], record["subject"]].append(record)
    order = sorted(rows, key=lambda row: ([*map(int, row[0].split("."))], row[1]))
    return [total(version, name, rows[version, name]) for version, name in order]


def total(version: str, name: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several campaigns of a subject in one version; such records can be added up again."""
    counts: dict[str, Counter[str]] = {key: Counter() for key in ("options", "features", "findings", "doubts")}
    for record in records:
        for key, counter in counts.items():
            counter.update(record[key])
    reached = [record["branches"]["reached"] for record in records]
    known = [one for one in reached if isinstance(one, int)]
    arcs = {tuple(arc) for one in reached if not isinstance(one, int) for arc in one}
    new: Counter[str] = Counter()
    found: dict[str, set[str]] = {"draw": set(), "search": set()}
    for record in records:
        for side, names in record.get("found", {}).items():
            found[side].update(names)
        new.update({kind: found if isinstance(found, int) else len(found) for kind, found in record["new"].items()})
    return {
        "torch": version,
        "subject": name,
        "campaigns": sum(record.get("campaigns", 1) for record in records),
        "strategies": sorted({one for record in records for one in record.get("strategies", [record.get("strategy")])}),
        **{key: sum(r[key] for r in records) for key in ("programs", "changed", "passed", "refuted", "inconclusive")},
        **{key: dict(sorted(counter.items())) for key, counter in counts.items()},
        "new": dict(sorted(new.items())),
        "found": {side: sorted(names) for side, names in found.items()},
        "branches": {"reached": max([len(arcs), *known]), "all": max(record["branches"]["all"] for record in records)},
        "cpu_s": round(sum(record["cpu_s"] for record in records), 1),
    }


_LOGS = click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False))


@main.command()
@_LOGS
def summary(logs: tuple[Path, ...]) -> None:
    """Print a line of JSON per version and subject."""
    for record in added(logs):
        print(json.dumps(record))


@main.command()
@_LOGS
def table(logs: tuple[Path, ...]) -> None:
    """Print a table with a row per version and subject, and the CPU time per version."""
    print("| torch | subject | CPU | programs | changed | refuted | unsure | options | features | branches | found |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    hours: Counter[str] = Counter()
    for record in added(logs):
        hours[record["torch"]] += record["cpu_s"] / 3600
        cells = [
            record["torch"], PREFIX + record["subject"], f"{record['cpu_s'] / 60:.1f} min", record["programs"],
            f"{record['changed'] / max(1, record['programs']):.0%}", record["refuted"], record["inconclusive"],
            len(record["options"]), len(record["features"]),
            f"{record['branches']['reached']} of {record['branches']['all']}", sum(record["new"].values()),
        ]  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")
    for version, spent in hours.items():
        print(f"\ntorch {version}: {spent:.2f} CPU hours")


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
def confirm(names: tuple[str, ...]) -> None:
    """Try the counterexamples of reports/pytorch in PyTorch's public API, and print a table."""
    findings = [one for one in read_findings(REPORTS) if one.counterexample is not None]
    unknown = sorted({*names} - {one.folder.name for one in findings})
    if unknown:
        raise click.UsageError(f"{REPORTS} has no counterexample of '{unknown[0]}'")
    print(f"| finding | subject | in torch {VERSION} | reach | end to end | seconds |")
    print("|---|---|---|---|---|--:|")
    counts: Counter[tuple[bool, str]] = Counter()
    for one in findings:
        if one.counterexample is None or (names and one.folder.name not in names):
            continue
        start = time.monotonic()
        told = try_end_to_end(read_counterexample(one.counterexample))
        here = VERSION in one.affects
        state = "-" if told is None else told.state
        counts[here, state] += 1
        cells = [one.folder.name, one.subject, "yes" if here else "no", one.reach, table_cell(str(told)),
                 f"{time.monotonic() - start:.0f}"]  # fmt: skip
        print("| " + " | ".join(cells) + " |", flush=True)
    for here in (True, False):
        ended = ", ".join(f"{counts[here, state]} {state}" for state in get_args(EndToEndState))
        print(f"\n{'defects' if here else 'no defects'} in torch {VERSION}: {ended}")


if __name__ == "__main__":
    main()
