"""Rules on the source that no linter checks."""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = sorted(ROOT.glob("tcverify/**/*.py"))
SOURCES = sorted({*PACKAGE, *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")})
MAX_LINES = 600


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """What every file says."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def names(paths: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def imported(tree: ast.Module) -> Iterator[str]:
    """Every module that a file imports, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def reached(tree: ast.Module, known: Collection[str]) -> Iterator[str]:
    """Every module that a file imports, whole or by what it has; a name that stands for a module is that module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            members = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (member if member in known else node.module for member in members)


def dependencies(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """By name of a module: which of the others it imports, for type checkers too, and inside of functions."""
    return {name: trees.keys() & set(reached(tree, trees)) for name, tree in trees.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the one before it, the first at either end; none where imports go in no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def called(tree: ast.Module) -> Iterator[str]:
    """The name of every function that a file calls by its bare name, unless on an empty text."""
    for node in ast.walk(tree):
        empty = isinstance(node, ast.Call) and ast.unparse(node).endswith("('')")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not empty:
            yield node.func.id


def test_the_sources_are_found() -> None:
    assert {"tcverify/errors.py", "tcverify/strategies/__init__.py", "tests/repository/test_layout.py"} <= set(
        names(SOURCES)
    )


def test_strategies_are_imported_as_part_of_the_package(trees: dict[Path, ast.Module]) -> None:
    # `import strategies` would make a second copy of the package, with classes of its own
    wrong = [path for path, tree in trees.items() if any(m.split(".")[0] == "strategies" for m in imported(tree))]
    assert names(wrong) == []


def test_imports_go_in_no_circle(trees: dict[Path, ast.Module]) -> None:
    package = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): tree
        for path, tree in trees.items()
        if path.is_relative_to(ROOT / "tcverify")
    }
    del package["tcverify"]  # imports its public names for type checkers, and else when they are used
    assert circle(dependencies(package)) == []


def test_circles_of_imports_are_seen() -> None:
    sources = {
        "p.a": "def f():\n    from p import b",
        "p.b": "if X:\n    from p.c import x",
        "p.c": "import p.a",
        "p": "",
    }
    graph = dependencies({name: ast.parse(text) for name, text in sources.items()})
    assert graph == {"p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.a"}, "p": set()}
    assert sorted(set(circle(graph))) == ["p.a", "p.b", "p.c"]
    assert circle({**graph, "p.c": set()}) == []


def test_no_module_is_too_long() -> None:
    wrong = [path for path in SOURCES if len(path.read_text(encoding="utf-8").splitlines()) > MAX_LINES]
    assert names(wrong) == []


def test_nothing_is_unpickled_or_evaluated(trees: dict[Path, ast.Module]) -> None:
    unsafe = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, {"eval", "exec", "__import__"}
    wrong = [path for path in PACKAGE if unsafe[0] & {*imported(trees[path])} or unsafe[1] & {*called(trees[path])}]
    assert names(wrong) == []


def test_what_is_looked_for_is_seen() -> None:
    tree = ast.parse("import strategies.x\nfrom pickle import loads\ndef f(): eval('1'), exec('')")
    assert {*imported(tree)} == {"strategies.x", "pickle"}
    assert {*called(tree)} == {"eval"}


def prints(code: str) -> str:
    """What a fresh interpreter prints."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def test_the_public_names_need_neither_hypothesis_nor_pytest() -> None:
    code = "import sys; from tcverify import *; print(verify, {'hypothesis', 'pytest', '_pytest'} & set(sys.modules))"
    assert prints(code).endswith("> set()")


def test_importing_tcverify_alone_costs_nothing() -> None:
    assert prints("import sys, tcverify; print('torch' in sys.modules)") == "False"


def test_what_starts_processes_imports_no_torch() -> None:
    # the command line starts what they are forked from before it imports torch itself
    assert prints("import sys, tcverify.system; print('torch' in sys.modules)") == "False"


def test_commands_import_nothing_that_takes_long_and_is_rarely_used() -> None:
    late = "{'sympy', 'torch._dynamo', 'torch._inductor', 'torch.distributed.tensor', 'ray'}"
    modules = "tcverify.cli.running, tcverify.replay, tcverify.report.html"
    assert prints(f"import sys, {modules}; print(*{late} & set(sys.modules))") == ""


def test_public_names_are_found_and_listed() -> None:
    code = (
        "import tcverify; print(*(n for n in dir(tcverify) if not n.startswith('_') and getattr(tcverify, n) is None))"
    )
    assert prints(code) == ""
    assert prints("import tcverify; print({*tcverify.__all__, 'verifies', 'Refuted'} <= {*dir(tcverify)})") == "True"


def test_other_names_are_not_found() -> None:
    assert prints("import tcverify; print(hasattr(tcverify, 'verifie'))") == "False"


def test_strategies_are_one_package_under_two_paths() -> None:
    assert (ROOT / "strategies").resolve() == ROOT / "tcverify" / "strategies"
