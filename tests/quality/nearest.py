"""Which test files a change can reach, nearest first: by the imports of the project, which are parsed and not run.

    python -m tests.quality.nearest tcverify/checks/streams/races.py

The distance of a test file is the number of imports between it and what has changed. A name counts where it is defined, not in
the packages that pass it on: `from tcverify.program import Mesh` is an import of `tcverify/program/mesh.py`. Importing it runs
the rest of the package, too; what is reached through that alone stands behind all else. So do tests that run the command line
or a session of pytest in a process: they reach everything.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: What holds Python that tests may import or name.
SOURCES = ("tcverify", "tests", "benchmarks", "docs")

#: Tests that reach everything, and so stand last.
EVERYTHING = ("tests/cli", "tests/docs", "tests/faults", "tests/pytest_plugin")

#: Modules that start processes: tests that import one reach everything, too.
STARTING = frozenset({"subprocess", "tests.warm"})

#: An import of a module that is run only since it lies in the same package as what is needed, or is the package's own.
ASIDE = 10

#: Farther than every import.
LAST = 1_000

#: The name of a module or the path of a file in a string, with the name of a pass behind it or not.
_NAMED = re.compile(r"(?P<module>[A-Za-z_][\w.]*)(:[\w.]+)?|(?P<path>[\w./-]+\.\w+)(:[\w.]+)?")


@dataclass
class _Module:
    """What a file says of its imports.

    Attributes:
        imports: modules that it names as a whole.
        names: (module, name) of what it takes from modules, wherever the import stands.
        passes_on: by its name here, the (module, name) that it is elsewhere; type checkers' imports among them.
        attributes: (name, attribute) wherever a name's attribute is taken.
        bound: name → the module that an import binds it to.
        defines: names that the file gives a meaning itself.
        said: strings that may name a module or a file.
        processes: whether it starts processes.
    """

    imports: set[str] = field(default_factory=set)
    names: set[tuple[str, str]] = field(default_factory=set)
    passes_on: dict[str, tuple[str, str]] = field(default_factory=dict)
    attributes: set[tuple[str, str]] = field(default_factory=set)
    bound: dict[str, str] = field(default_factory=dict)
    defines: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)
    processes: bool = False


class Graph:
    """The imports of a project.

    Args:
        root: its directory; files are named relative to it.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root.resolve()
        self.paths: dict[str, Path] = {}
        for source in SOURCES:
            for path in sorted((self.root / source).rglob("*.py")):
                relative = path.relative_to(self.root)
                if not {"__pycache__", "node_modules"} & set(relative.parts):
                    self.paths.setdefault(self._dotted(relative), relative)
        self._names = {path: name for name, path in self.paths.items()}
        self._modules = {name: _read(self.root / path, name) for name, path in self.paths.items()}
        self._edges = {name: self._imports_of(name) for name in self.paths}
        self.tests = sorted(path for path in self._names if path.parts[0] == "tests" and path.name.startswith("test_"))

    @staticmethod
    def _dotted(path: Path) -> str:
        parts = list(path.with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    # --------------------------------------------------------------------------------------------------------- edges

    def _imports_of(self, name: str) -> dict[str, int]:
        """The modules that a module imports or names, each with how far it is from there."""
        module, found = self._modules[name], dict[str, int]()

        def add(other: str, distance: int) -> None:
            if other in self.paths and other != name:
                found[other] = min(distance, found.get(other, distance))

        for whole in module.imports:
            add(whole, ASIDE if self._is_package(whole) else 1)
        taken = {(module.bound[one], attribute) for one, attribute in module.attributes if one in module.bound}
        for source, wanted in module.names | {one for one in taken if self._is_package(one[0])}:
            add(self.home(source, wanted), 1)
            add(source, ASIDE)
        for text in module.said:
            named = self._named(text)
            if named is not None:
                add(named, 1)
        for other in list(found):
            parents = other.split(".")[:-1]
            for end in range(1, len(parents) + 1):
                add(".".join(parents[:end]), ASIDE)
        path = self.paths[name]
        if path.parts[0] == "tests":
            for parent in path.parents:
                add(".".join((*parent.parts, "conftest")), ASIDE)
        return found

    def _is_package(self, name: str) -> bool:
        return name in self.paths and self.paths[name].name == "__init__.py"

    def home(self, module: str, name: str) -> str:
        """The module that gives a name of a module its meaning, as far as packages pass it on."""
        seen = set()
        while (module, name) not in seen:
            seen.add((module, name))
            if f"{module}.{name}" in self.paths:
                return f"{module}.{name}"
            known = self._modules.get(module)
            if known is None or not self._is_package(module) or name in known.defines or name not in known.passes_on:
                break
            module, name = known.passes_on[name]
        return module

    def _named(self, text: str) -> str | None:
        match = _NAMED.fullmatch(text)
        if match is None:
            return None
        if match["module"] in self.paths:
            return match["module"] if "." in match["module"] else None
        path = text.split(":")[0]
        return self._names.get(Path(path)) if path.endswith(".py") else None

    # ----------------------------------------------------------------------------------------------------- distances

    def nearest(self, changed: Collection[Path | str]) -> list[Path]:
        """See the function of this name."""
        far = self._distances(changed)
        stems = {self._relative(path).with_suffix("").parts[-2:] for path in changed}

        def order(path: Path) -> tuple[object, ...]:
            distance = far[path]
            aside = 0 if not distance else 1 if distance < ASIDE else 2
            return aside, not _called_after(path, stems), distance, path.parts[1] != "unit", self._breadth(path), path

        return sorted((path for path in self.tests if path in far), key=order)

    def _distances(self, changed: Collection[Path | str]) -> dict[Path, int]:
        """By test file, how far it is from the nearest file that has changed, of those that reach one."""
        paths = [self._relative(path) for path in changed]
        back = self._back_from({name for path in paths for name in self._of_file(path)})
        found = {self.paths[name]: distance for name, distance in back.items() if self.paths[name] in self.tests}
        for path in self.tests:
            if self._mentions(path, paths):
                found[path] = min(1, found.get(path, 1))
            elif any(one.parts[0] == "docs" for one in paths) and path.is_relative_to("tests/docs"):
                found[path] = min(LAST, found.get(path, LAST))
            elif any(one.parts[0] in ("tcverify", "strategies") for one in paths):
                if any(path.is_relative_to(one) for one in EVERYTHING):
                    own = found.get(path, LAST)
                    found[path] = own and LAST + own  # 0: it has changed itself
                elif self._modules[self._names[path]].processes:
                    found.setdefault(path, LAST)
        return found

    def _relative(self, path: Path | str) -> Path:
        whole = self.root / path
        try:
            return whole.resolve().relative_to(self.root)
        except ValueError:
            raise ValueError(f"{path} is not in {self.root}") from None

    def _of_file(self, path: Path) -> list[str]:
        """The modules that stand for a file: itself, what names it, or those that lie with it, where it is data."""
        if path in self._names:
            return [self._names[path]]
        if path.suffix == ".py":
            return []  # removed: nothing can import it any more, or fails where it stands
        for parent in path.parents:
            beside = [name for other, name in self._names.items() if other.parent == parent]
            if beside and parent.parts[0] not in ("docs", "benchmarks"):
                return beside
        return []

    def _mentions(self, test: Path, changed: list[Path]) -> bool:
        said = self._modules[self._names[test]].said
        return any(path.suffix != ".py" and (path.name in said or str(path) in said) for path in changed)

    def _back_from(self, start: set[str]) -> dict[str, int]:
        """The distances of all modules that import some of these, directly or not."""
        importers: dict[str, list[tuple[str, int]]] = {}
        for name, edges in self._edges.items():
            for other, distance in edges.items():
                importers.setdefault(other, []).append((name, distance))
        far = dict.fromkeys(start, 0)
        queue = [(0, name) for name in sorted(start)]
        while queue:
            distance, name = heapq.heappop(queue)
            if distance > far[name]:
                continue
            for importer, step in importers.get(name, ()):
                if distance + step < far.get(importer, LAST):
                    far[importer] = distance + step
                    heapq.heappush(queue, (distance + step, importer))
        return far

    def _breadth(self, test: Path) -> int:
        """How many modules a test file imports, directly or not: the fewer, the more it is about each."""
        seen = {self._names[test]}
        queue = list(seen)
        while queue:
            for other, distance in self._edges[queue.pop()].items():
                if distance < ASIDE and other not in seen:
                    seen.add(other)
                    queue.append(other)
        return len(seen)


def _called_after(test: Path, changed: Collection[tuple[str, ...]]) -> bool:
    """Whether a test file bears the name of a module, given as its package and its name, or that of its package."""
    name = test.stem.removeprefix("test_")
    return any(f"_{module}_" in f"_{name}_" or package == [name] for *package, module in changed)


@cache
def graph(root: Path = ROOT) -> Graph:
    """The imports of a project, parsed once per process."""
    return Graph(root)


def nearest(changed: Collection[Path | str], root: Path = ROOT) -> list[Path]:
    """Return the test files that a change can reach, nearest first.

    Args:
        changed: files, relative to `root` or absolute; of any kind, and files that are gone, too.
        root: the project's directory.

    Returns:
        Paths relative to `root`. A changed test file is the nearest of all. Of those that import the change, those that are
        called after it come first, then the distance counts, then unit tests come first, then those that import few modules.
        For data in a package or beside tests (templates, snapshots) its modules and these tests count as changed; a document
        is reached by tests that name it, and by those of the documentation.

    Raises:
        ValueError: a file is not in the project.
    """
    return graph(root).nearest(changed)


# -------------------------------------------------------------------------------------------------------------- reading


def _read(path: Path, name: str) -> _Module:
    found = _Module()
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    typed = {id(node) for block in _for_type_checkers(tree) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if id(node) not in typed:
                    found.imports.add(alias.name)
                found.bound[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(node, package)
            for alias in node.names:
                if id(node) not in typed:
                    found.names.add((source, alias.name))
                found.passes_on[alias.asname or alias.name] = source, alias.name
                found.bound[alias.asname or alias.name] = f"{source}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            found.attributes.add((_words(node.value), node.attr))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            found.said.add(node.value)
    sources = (
        found.imports | {source for source, _ in found.names} | {f"{source}.{name}" for source, name in found.names}
    )
    found.processes = not sources.isdisjoint(STARTING)
    found.defines = {one for statement in tree.body for one in _defined(statement)}
    return found


def _words(node: ast.expr) -> str:
    """A name with dots; "" for what is none."""
    if isinstance(node, ast.Attribute):
        return f"{_words(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _for_type_checkers(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        if isinstance(node, ast.If) and _words(node.test).endswith("TYPE_CHECKING"):
            yield from node.body


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    return ".".join((*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])))


def _defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the test files that a change can reach, nearest first.")
    parser.add_argument("changed", nargs="+", help="files that have changed")
    for path in nearest(parser.parse_args().changed):
        print(path)


if __name__ == "__main__":
    main()
