"""Which tests a change reaches: a small project in which every rule shows, and this one."""

import textwrap
from pathlib import Path

import pytest

from tests.quality.nearest import EVERYTHING, Graph, nearest

PROJECT = {
    "tcverify/__init__.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from tcverify.shapes import Square
        """,
    "tcverify/shapes/__init__.py": """
        from tcverify.shapes.circle import Circle
        from tcverify.shapes.square import Square
        """,
    "tcverify/shapes/circle.py": """
        class Circle: ...
        """,
    "tcverify/shapes/square.py": """
        class Square: ...
        """,
    "tcverify/shapes/pages/page.html": "<p>",
    "tcverify/area.py": """
        from tcverify.shapes import Circle, Square
        """,
    "tcverify/registry.py": """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from tcverify.area import nothing
        """,
    "tcverify/strategies/__init__.py": "",
    "tcverify/strategies/drawn.py": "",
    "docs/tutorial.md": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "import tcverify.registry",
    "tests/unit/squares.py": "from tcverify.shapes import Square",
    "tests/unit/test_square.py": "from tests.unit.squares import Square",
    "tests/unit/test_circle.py": "from tcverify.shapes import Circle",
    "tests/unit/test_area.py": """
        def test_area():
            from tcverify.area import area
        """,
    "tests/unit/test_lazy.py": """
        import tcverify
        tcverify.Square
        """,
    "tests/unit/test_named.py": 'PASS = "tests.unit.squares:Pass"',
    "tests/unit/test_drawn.py": "from tcverify.strategies import drawn",
    "tests/unit/test_readme.py": 'ROOT / "README.md"',
    "tests/cli/test_outputs.py": "import tcverify.area",
    "tests/cli/snapshots/outputs.txt": "",
    "tests/docs/test_examples.py": "",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    root = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    (root / "strategies").symlink_to("tcverify/strategies")
    return Graph(root)


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


#: They run tcverify in a process, so that every change of it reaches them.
LAST = {"test_outputs", "test_examples"}


def test_a_name_counts_where_it_is_defined(project: Graph) -> None:
    found = names(project.nearest(["tcverify/shapes/circle.py"]))
    assert found[:2] == ["test_circle", "test_area"]
    assert set(found[-2:]) == LAST
    # the rest import the package, and with it the circle
    assert set(found[2:-2]) == {"test_square", "test_lazy", "test_named"}


def test_lazy_names_imports_of_test_programs_and_names_in_strings_count(project: Graph) -> None:
    found = names(project.nearest(["tcverify/shapes/square.py"]))
    assert found[:2] == ["test_square", "test_lazy"]  # the first is called after it
    assert set(found[2:4]) == {"test_named", "test_area"}


def test_imports_for_type_checkers_do_not_count(project: Graph) -> None:
    assert "test_drawn" not in names(project.nearest(["tcverify/area.py"]))
    assert project.home("tcverify", "Square") == "tcverify.shapes.square"


def test_what_a_fixture_needs_is_reached_by_all(project: Graph) -> None:
    found = names(project.nearest(["tcverify/registry.py"]))
    assert len(found) == len(project.tests)
    assert set(found[-2:]) == LAST


def test_strategies_are_found_under_both_paths(project: Graph) -> None:
    assert names(project.nearest(["strategies/drawn.py"]))[0] == "test_drawn"
    assert project.nearest(["tcverify/strategies/drawn.py"]) == project.nearest(["strategies/drawn.py"])


def test_a_changed_test_is_the_nearest_of_all(project: Graph) -> None:
    assert names(project.nearest(["tests/unit/test_area.py"])) == ["test_area"]
    assert names(project.nearest(["tests/cli/test_outputs.py", "tcverify/shapes/circle.py"]))[:2] == [
        "test_outputs",
        "test_circle",
    ]
    assert names(project.nearest(["tests/unit/squares.py"])) == ["test_named", "test_square"]


def test_data_stand_for_what_they_lie_with(project: Graph) -> None:
    assert set(names(project.nearest(["tcverify/shapes/pages/page.html"]))[:2]) == {"test_circle", "test_lazy"}
    assert names(project.nearest(["tests/cli/snapshots/outputs.txt"])) == ["test_outputs"]


def test_documents_are_reached_by_what_names_them_and_by_their_tests(project: Graph) -> None:
    assert names(project.nearest(["README.md"])) == ["test_readme"]
    assert names(project.nearest(["docs/tutorial.md"])) == ["test_examples"]


def test_what_is_called_after_the_change_comes_first(project: Graph) -> None:
    more = "import tcverify.area, tcverify.registry"
    (project.root / "tests/unit/test_area_of_all.py").write_text(more)
    (project.root / "tests/unit/test_all.py").write_text("import tcverify.area")
    found = names(Graph(project.root).nearest(["tcverify/area.py"]))
    assert found[:3] == ["test_area", "test_area_of_all", "test_all"]


def test_files_that_are_gone_or_outside(project: Graph) -> None:
    assert set(names(project.nearest(["tcverify/gone.py"]))) == LAST
    with pytest.raises(ValueError, match="is not in"):
        project.nearest(["/etc/passwd"])


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("checks/streams/races.py", "checks/streams/test_happens_before.py"),
        ("execution/lockstep/lockstep.py", "execution/test_lockstep.py"),
        ("passes/multistream/multistream.py", "passes/multistream/test_multistream.py"),
        ("campaign/campaign.py", "campaign/test_campaign.py"),
        ("strategies/draft.py", "strategies/test_draft.py"),
    ],
)
def test_here(file: str, test: str) -> None:
    found = [str(path) for path in nearest([f"tcverify/{file}"])]
    assert f"tests/{test}" in found[:12]
    assert min(place for place, name in enumerate(found) if name.startswith(EVERYTHING)) > 12
