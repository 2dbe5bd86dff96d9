"""Generates the reference pages of the site from the code, when mkdocs builds it.

mkdocs calls `on_files`; `pages()` returns the same pages. The tables of docs/pytorch.md and docs/reliability.md are part of
those pages: `python docs/generate.py` regenerates them, and tests compare them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

import tcverify
from tcverify.checks import CHECKS
from tcverify.cli import main
from tcverify.domains import DOMAINS
from tcverify.errors import UnsupportedOp
from tcverify.ops import Op, lookup, registered_dialects, resolve
from tcverify.passes import BUILTIN, DESCRIPTIONS, SUITED
from tcverify.program import KINDS, Contract, Doubt, Note
from tcverify.program.contract import _WORDS
from tcverify.pytest_plugin.profiles import PROFILES
from tcverify.pytorch import PREFIX, SUBJECTS
from tcverify.pytorch.findings import REACHES, VERSIONS, TorchFinding, read_findings
from tcverify.registry.glossary import GLOSSARY
from tcverify.strategies import DEFAULT_STRATEGY, STRATEGIES

#: What stands on top of every page.
GENERATED = "<!-- written by docs/generate.py from the code -->\n"


def on_files(files: Any, config: Any) -> Any:
    """The hook of mkdocs: adds the pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Return the text of every generated page, by its path below docs/."""
    made = {
        "reference/cli.md": command_line(),
        "reference/python.md": python(),
        "reference/contract.md": contract(),
        "reference/ops.md": ops(),
        "reference/verdicts.md": verdicts(),
    }
    return {path: GENERATED + text for path, text in made.items()}


def cell(text: str) -> str:
    """Text for one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


# ------------------------------------------------------------------------------------------------------ command line


def command_line() -> str:
    """The page of the command line, from click."""
    root = click.Context(main.main, info_name="tcverify", **main.main.context_settings)
    parts = [
        "# Command line\n",
        f"{inspect.cleandoc(main.main.help or '')}\n",
        "```text",
        "tcverify [--debug] COMMAND …",
        "```\n",
    ]
    for name, command in main.COMMANDS.items():
        context = click.Context(command, info_name=name, parent=root)
        words = " ".join(command.collect_usage_pieces(context))
        parts += [
            f"## tcverify {name}\n",
            "```text",
            f"tcverify {name} {words}",
            "```\n",
            f"{inspect.cleandoc(command.help or '')}\n",
        ]
        options = [p.get_help_record(context) for p in command.get_params(context) if isinstance(p, click.Option)]
        rows = [(f"`{record[0]}`".replace("|", "\\|"), cell(record[1])) for record in options if record is not None]
        parts.append(table(("option", ""), rows))
    parts.append(_configuration())
    return "\n".join(parts)


def _configuration() -> str:
    names = sorted(str(p.name).replace("_", "-") for p in main.COMMANDS["run"].params if isinstance(p, click.Option))
    keys = ", ".join(f"`{name}`" for name in names)
    return (
        "## Configuration\n\n"
        "`[tool.tcverify]` of the `pyproject.toml` in the current directory sets defaults of "
        "`tcverify run`; the command line takes precedence. "
        f"Its keys are {keys}. Use lists for options that the command line separates by commas, "
        f"and tables for options with `=`. "
        "`run`, `replay`, `show` and the pytest plugin load the modules in `extension`; "
        "the plugin also reads `confirm`, `domain`, "
        "`profile` and `report-dir`.\n\n"
        "## Options of pytest\n\n"
        + table(
            ("profile", "items per pass and number of ranks", "programs per item"),
            [(f"`{name}`", str(profile.shards), str(profile.max_examples)) for name, profile in PROFILES.items()],
        )
        + "\n`--tcverify-profile` selects one. `--tcverify-confirm` and `--tcverify-domain` are "
        "as `--confirm` and `--domain` above; "
        "`--tcverify-report-dir DIR` is the directory for counterexamples, `--tcverify-seed N` draws other programs.\n\n"
        "## Built-in passes\n\n"
        + table(
            ("name", "", "drawn"),
            [(f"`{n}`", cell(DESCRIPTIONS[n]), f"`{SUITED.get(n, DEFAULT_STRATEGY)}`") for n in BUILTIN],
        )
        + "\n## Strategies\n\n"
        + table(("name", "draws"), [(f"`{n}`", cell(_summary(f).removeprefix("Draw "))) for n, f in STRATEGIES.items()])
        + "\n## Checks\n\n"
        + table(("name", ""), [(f"`{n}`", cell(_summary(f))) for n, f in CHECKS.items()])
    )


def _summary(function: Callable[..., Any]) -> str:
    """The first sentence of a docstring."""
    text = inspect.getdoc(function) or ""
    return " ".join(text.split("\n\n")[0].split()).split(" Arguments as of")[0]


# ------------------------------------------------------------------------------------------------------------ Python


#: Titles of the parts of the page, with the names that stand in them.
PARTS = {
    "Verifying": (
        "verify", "run", "RunResult", "verifies", "Verdict", "Finding", "Contract", "Guarded", "Lockstep", "ProcessGroupPool",
    ),
    "Graphs of a compiler": ("capture", "Captured", "program_of", "checked", "checked_backend", "annotate", "Refuted"),
    "Programs": (
        "Program", "Mesh", "InputSpec", "Recipe", "spmd_program", "GraphBuilder", "Placement", "shard", "dumps", "loads",
    ),
    "Programs of layouts": ("PlacedBuilder", "Placed", "DeviceMesh", "Layout"),
    "Extensions": (
        "load_extension", "register_dialect", "Op", "register_check", "Evidence", "register_strategy", "register_executor",
        "Executor",
    ),
    "Errors": ("TcverifyError", "Unsupported"),
}  # fmt: skip


def python() -> str:
    """The page of the Python interface: mkdocstrings makes it of the docstrings of the public names."""
    names = (*tcverify.__all__, "verifies", "run", "RunResult")
    public = [name for name in names if hasattr(getattr(tcverify, name), "__module__")]
    constants = {name: getattr(tcverify, name) for name in tcverify.__all__ if name.isupper()}
    listed = [name for names in PARTS.values() for name in names]
    rest = [name for name in public if name not in listed and name not in constants]
    parts = ["# Python\n", "All names are attributes of `tcverify`.\n"]
    for title, names in {**PARTS, **({"Further names": tuple(rest)} if rest else {})}.items():
        parts.append(f"## {title}\n")
        for name in names:
            found = getattr(tcverify, name)
            parts += [f"::: {found.__module__}.{found.__qualname__}\n"]
        if title == "Programs":
            rows = [(f"`{name}`", f"`{value}`") for name, value in constants.items()]
            parts.append("\n" + table(("placement", "is"), rows))
    return "\n".join(parts)


# ---------------------------------------------------------------------------------------------------------- contract


def contract() -> str:
    """The page of promises, from the fields of `Contract` and their documentation."""
    documented = documented_attributes(Contract)
    rows = []
    for field in dataclasses.fields(Contract):
        values = " or ".join(f"`{word}`" for word in _WORDS.get(field.name, ())) or "`true` or `false`"
        if field.default is None and field.name != "metadata":
            values = "a number of at least 0"
        default = "nothing promised" if field.default is None else f"`{str(field.default).lower()}`"
        rows.append((f"`{field.name}`", values, default, cell(documented[field.name])))
    return (
        "# What a pass promises\n\n"
        "Every pass promises to preserve the meaning of programs. Further promises are "
        "checked as well. A pass declares them in its attribute "
        "`contract`, a `tcverify.Contract`; `--contract name=value` on the command line and "
        "`contract={…}` of `verifies` override it.\n\n" + table(("promise", "values", "default", ""), rows)
    )


def documented_attributes(kind: type) -> dict[str, str]:
    """Return what the section Attributes of a docstring says of each name."""
    section = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        start = re.match(r"    (\w[\w, ]*): (.*)", line)
        if start is not None:
            names = [name.strip() for name in start[1].split(",")]
        for name in names:
            found[name] = f"{found.get(name, '')} {start[2] if start is not None else line.strip()}".strip()
    return found


# --------------------------------------------------------------------------------------------------------------- ops


def ops() -> str:
    """The page of what ops mean, from the tables of the dialects."""
    parts = [
        "# Ops\n",
        "The ops with a meaning, by dialect. Any other op with a signature is "
        "[an unknown function of its operands](../howto/dialect.md#ops-without-a-meaning), until "
        "[a dialect of your own](../howto/dialect.md) gives it a meaning.\n",
        "**Collective**: ranks communicate in it. **Start** and **wait**: the two ends of an "
        "asynchronous collective. **View**: it may share "
        "storage with an operand, or write into one. **Effect**: it keeps its order relative to all "
        "communication. **Busy** is the resource that it uses while it runs.\n",
    ]
    for namespace, known in sorted(registered_dialects().items()):
        rows = [row for op in known if (row := _row(op)) is not None]
        if rows:
            parts += [f"## {namespace}\n", table(("op", "signature", "kind", "busy"), rows)]
        refused = [(f"`{op.name}`", cell(op.reason)) for op in known if op.run is None]
        if refused:
            parts += ["Known, but without a meaning:\n", table(("op", "why"), refused)]
    parts.append(_aten())
    return "\n".join(parts)


def _row(op: Op) -> tuple[str, ...] | None:
    if op.run is None:
        return None
    kinds = ["collective"] if op.collective and op.phase is None else []
    kinds += [op.phase] if op.phase is not None else []
    kinds += [
        word
        for word, true in (("view or in place", op.aliases), ("identity", op.identity), ("effect", op.effect))
        if true
    ]
    return (
        f"`{op.name.partition('::')[2]}`",
        f"`{_signature(op)}`",
        ", ".join(kinds) or "local",
        ", ".join(op.resources),
    )


def _signature(op: Op) -> str:
    """As the table has it, else as torch has it; what this torch lacks has none."""
    if op.signature:
        return op.signature.replace("|", "\\|")
    try:
        target = resolve(op.name)
    except (UnsupportedOp, AttributeError, RuntimeError):
        return "not in this torch"
    return "(" + str(target._schema).partition("(")[2].replace("|", "\\|")


def _aten() -> str:
    refused: dict[str, list[str]] = {}
    for name in sorted({schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")}):
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        for overload in packet.overloads() if packet is not None else ():
            op = lookup(getattr(packet, overload))
            if op.run is None:
                refused.setdefault(op.reason, []).append(name.removeprefix("aten::"))
    rows = [
        (cell(reason), ", ".join(f"`{n}`" for n in dict.fromkeys(names))) for reason, names in sorted(refused.items())
    ]
    return (
        "## aten\n\nEvery op of aten means what torch computes, on doubles; "
        "[The exact domain](../exact.md) lists what each keeps in the exact "
        "domain. These ops have no meaning, because their result is not a function of their arguments:\n\n"
        + table(("why", "ops"), rows)
    )


# ---------------------------------------------------------------------------------------------------------- verdicts


def verdicts() -> str:
    """The page of verdicts, kinds of findings, doubts and notes."""
    kinds = [(f"`{kind}`", cell(meaning)) for kind, meaning in KINDS.items()]
    domains = ", ".join(f"`{name}`" for name in DOMAINS)
    return (
        "# Verdicts and findings\n\n"
        "A verdict is **passed**, **refuted** (there are findings) or **inconclusive** (there "
        "is a doubt, and no finding). An inconclusive "
        "program never counts as passed. A run passes if a program passed, none was "
        "refuted, and the pass changed some program.\n\n"
        "## Kinds of findings\n\nOne counterexample is kept per kind.\n\n"
        + table(("kind", "meaning"), kinds)
        + f"\n## Doubts\n\nWhy a verdict is inconclusive: {_sentence(documented_attributes(Doubt)['reason'])}\n\n"
        f"## Notes\n\nRemarks that do not change a verdict: {_sentence(documented_attributes(Note)['reason'])}\n\n"
        f"## Number domains\n\n{domains}: see [Number domains](../howto/domains.md).\n"
    )


def _sentence(text: str) -> str:
    """Words in quotes become code."""
    return re.sub(r'"([a-z0-9-]+)"', r"`\1`", text)


# ----------------------------------------------------------------------------------------------------------- PyTorch

ROOT = Path(__file__).parents[1]
FOUND = ROOT / "reports" / "pytorch"

#: A page that has tables in itself.
PYTORCH = ROOT / "docs" / "pytorch.md"


def pytorch(text: str, found: Path = FOUND) -> str:
    """A page with the tables of PyTorch's subjects and of the findings in a directory put in between their marks."""
    findings = read_findings(found)
    tables = {
        "subjects": _subjects(),
        "versions": _versions(findings, found),
        "campaigns": _campaigns(found),
        "covered": _covered(found),
        "findings": _findings(findings, found),
        "unshown": _unshown(findings),
    }
    return _filled(text, tables)


def _filled(text: str, tables: dict[str, str]) -> str:
    """A page with tables put in between their marks."""
    for name, made in tables.items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->\n"
        before, mark, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not mark or not closed:
            raise ValueError(f"the page has no marks {start.strip()} and {end.strip()}")
        text = f"{before}{start}\n{made}\n{end}{after}"
    return text


def _subjects() -> str:
    rows = []
    for one in SUBJECTS.values():
        options = ", ".join(f"`{name}` ({len(values)})" for name, values in one.draws.items())
        rows.append((f"`{PREFIX}{one.name}`", cell(one.what), f"`{one.source}`", f"`{one.strategy}`", options))
    return table(("subject", "what it does", "in torch", "programs", "options, and how many values are drawn"), rows)


def _versions(findings: tuple[TorchFinding, ...], found: Path) -> str:
    """A row per subject, a column per version: whether it is there, how many programs ran, how many causes show."""
    ran: Counter[tuple[str, str]] = Counter()
    for record in campaigns(found):
        ran[record["torch"], record["subject"]] += record["programs"]
    rows = []
    for one in SUBJECTS.values():
        cells = []
        for version in campaigned(found):
            causes = sum(finding.subject == PREFIX + one.name and version in finding.affects for finding in findings)
            said = f"{ran[version, one.name]:,} programs" if ran[version, one.name] else "yes"
            said += f", {causes} found" if causes else ""
            cells.append(said if one.exists_in(version) else "–")
        rows.append((f"`{PREFIX}{one.name}`", *cells))
    total = [f"{sum(version in finding.affects for finding in findings)} found" for version in campaigned(found)]
    return table(("subject", *(f"torch {version}" for version in campaigned(found))), [*rows, ("all", *total)])


def campaigns(found: Path) -> list[dict[str, Any]]:
    """What campaigns came to, a record per version and subject: what `benchmarks/pytorch.py summary` has printed."""
    log = found / "campaigns.ndjson"
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []


def campaigned(found: Path) -> list[str]:
    """The releases in which campaigns ran."""
    ran = {record["torch"] for record in campaigns(found)}
    return [version for version in VERSIONS if version in ran]


def _campaigns(found: Path) -> str:
    """A row per version: how much ran."""
    rows = []
    for version in campaigned(found):
        ran = [record for record in campaigns(found) if record["torch"] == version]
        if ran:
            hours = sum(record["cpu_s"] for record in ran) / 3600
            counts = (
                sum(one[key] for one in ran) for key in ("campaigns", "programs", "changed", "refuted", "inconclusive")
            )
            rows.append((version, f"{hours:.1f}", *(f"{count:,}" for count in counts)))
    head = ("torch", "CPU hours", "campaigns", "programs", "changed by the pass", "refuted", "inconclusive")
    return table(head, rows)


def _covered(found: Path) -> str:
    """A row per subject that ran: what its campaigns drew and reached, by version."""
    ran = {(record["torch"], record["subject"]): record for record in campaigns(found)}
    rows = []
    for one in SUBJECTS.values():
        drawn = {f"{name}={value}" for name, values in one.draws.items() for value in values}
        cells = []
        for version in campaigned(found):
            record = ran.get((version, one.name))
            if record is None:
                cells.append("")
                continue
            reached = record["branches"]
            values = f"{len(drawn.intersection(record['options']))} of {len(drawn)}, " if drawn else ""
            cells.append(f"{values}{len(record['features'])}, {reached['reached']} of {reached['all']}")
        if any(cells):
            rows.append((f"`{PREFIX}{one.name}`", *cells))
    return table(("subject", *(f"torch {version}" for version in campaigned(found))), rows)


def _unshown(findings: tuple[TorchFinding, ...]) -> str:
    return table(
        ("finding", "why no subject shows it"), [(f"`{x.folder.name}`", cell(x.unshown)) for x in findings if x.unshown]
    )


def _findings(findings: tuple[TorchFinding, ...], found: Path) -> str:
    """A row per finding: what shows without a setting comes first."""
    sides: dict[str, set[str]] = defaultdict(set)
    for record in campaigns(found):
        for side, names in record["found"].items():
            for name in names:
                sides[name].add({"draw": "drawing", "search": "search"}[side])
    rows = []
    for one in sorted(findings, key=lambda one: [*REACHES].index(one.reach)):
        reported = "no" if one.reported == "unreported" else f"[yes]({one.reported})"
        cause = f"`{one.cause.removeprefix('torch/')}`"
        met = ", ".join(sorted(sides[one.folder.name])) or "no"
        rows.append(
            (f"`{one.folder.name}`: {cell(one.title)}", f"`{one.kind}`", cause, one.reach, met, one.span, reported)
        )
    measured = f"versions, of {VERSIONS[0]} to {VERSIONS[-1]}"
    return table(("finding", "kind", "cause, in torch/", "reach", "in campaigns", measured, "reported"), rows)


def issue(one: TorchFinding) -> str:
    """The text that is to be filed, with the line of its versions put in."""
    text = one.folder.joinpath("issue.md").read_text(encoding="utf-8")
    line = f"**Versions**, of {VERSIONS[0]} to {VERSIONS[-1]}: {one.span}."
    made, count = re.subn(r"(?m)^\*\*Versions\*\*.*$", lambda _: line, text)
    if count != 1:
        raise ValueError(f"{one.folder / 'issue.md'} has {count} lines that begin with **Versions**, and not one")
    return made


# ------------------------------------------------------------------------------------------------------- reliability

FAULT_TESTS = ROOT / "tests" / "faults"
RELIABILITY = ROOT / "docs" / "reliability.md"


class Fault(NamedTuple):
    """A fault that a test causes.

    Attributes:
        what, becomes: as the mark of the test says.
        test: "file.py::name".
        slow: whether it is left out of `make test`.
    """

    what: str
    becomes: str
    test: str
    slow: bool


def faults(directory: Path = FAULT_TESTS) -> list[Fault]:
    """Return what tests with the mark `fault` show, in the order of the files."""
    found = []
    for path in sorted(directory.glob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            marks = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
            for one in node.decorator_list:
                if isinstance(one, ast.Call) and ast.unparse(one.func) == "pytest.mark.fault":
                    what, becomes = map(ast.literal_eval, one.args)
                    found.append(Fault(what, becomes, f"{path.name}::{node.name}", "pytest.mark.slow" in marks))
    return found


def reliability(text: str) -> str:
    """The page of faults, with the table of tests put in."""
    rows = [
        (cell(one.what), cell(one.becomes), f"`{one.test}`" + (" (`tox -e nightly-faults`)" if one.slow else ""))
        for one in faults()
    ]
    return _filled(text, {"faults": table(("fault", "what becomes of it", "shown by, in tests/faults/"), rows)})


# ---------------------------------------------------------------------------------------------------------- glossary

GLOSSARY_PAGE = ROOT / "docs" / "glossary.md"


def _anchor(term: str) -> str:
    return term.partition(",")[0].replace(" ", "-").lower()


def glossary(text: str) -> str:
    """The page of terms, with the table put in."""
    rows = [(f'<a id="{_anchor(term)}"></a>**{term}**', cell(meaning)) for term, meaning in GLOSSARY.items()]
    return _filled(text, {"terms": table(("term", "meaning"), rows)})


if __name__ == "__main__":
    GLOSSARY_PAGE.write_text(glossary(GLOSSARY_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    RELIABILITY.write_text(reliability(RELIABILITY.read_text(encoding="utf-8")), encoding="utf-8")
    PYTORCH.write_text(pytorch(PYTORCH.read_text(encoding="utf-8")), encoding="utf-8")
    for one in read_findings(FOUND):
        one.folder.joinpath("issue.md").write_text(issue(one), encoding="utf-8")
        if one.counterexample is not None:
            about = json.dumps(one.about, indent=1, ensure_ascii=False)
            one.folder.joinpath("about.json").write_text(about + "\n", encoding="utf-8")
