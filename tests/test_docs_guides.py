"""The guides are what their examples say, and every page of the documents is in their index."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = runpy.run_path(str(DOCS / "make_guides.py"))["pages"]()


def test_there_is_a_guide_for_each_example_and_no_other():
    assert {path.stem for path in (DOCS / "guides").glob("*")} == set(MADE)
    assert set(MADE) == {path.parent.name for path in (ROOT / "examples").glob("*/single.py")}


@pytest.mark.parametrize("name", MADE)
def test_a_guide_is_what_its_example_says(name):
    page = (DOCS / "guides" / f"{name}.md").read_text()
    assert page == MADE[name], f"Run python docs/make_guides.py: docs/guides/{name}.md is not what it makes."


@pytest.mark.parametrize("name", MADE)
def test_the_difference_in_a_guide_makes_one_script_the_other(name):
    """The diff is applied by hand: every line that it takes away is in single.py, every one that it adds in mirrored.py."""
    folder = ROOT / "examples" / name
    diff = re.findall(r"```diff\n(.*?)```", MADE[name], flags=re.DOTALL)[0].splitlines()[2:]
    single, mirrored = ((folder / f"{kind}.py").read_text().splitlines() for kind in ("single", "mirrored"))
    for line in diff:
        if line != "@@":
            assert line[0] == "+" or line[1:] in single, line
            assert line[0] == "-" or line[1:] in mirrored, line
    assert any(line.startswith("+") and "Strategy(" in line for line in diff)


def _in_the_index():
    return re.findall(r"^- \[[^]]+\]\(([^)]+)\)", (DOCS / "README.md").read_text(), flags=re.MULTILINE)


def test_every_page_is_in_the_index_once():
    listed = _in_the_index()
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if path.parent.name != "decisions"]
    others = {"README.md", "contents.md"}  # this index, and the sidebar of the site
    assert sorted(listed) == sorted({*pages, "../ARCHITECTURE.md", "../CONTRIBUTING.md", "decisions"} - others)


def test_the_sidebar_of_the_site_has_the_pages_in_the_order_of_the_index():
    names = [(DOCS / page.removesuffix(".md")).resolve().relative_to(ROOT).as_posix() for page in _in_the_index()]
    sidebar = (DOCS / "contents.md").read_text().splitlines()
    assert [line for line in sidebar if line in names] == names
