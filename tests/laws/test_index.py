"""README.md lists the tests of each law."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
TEXT = (FOLDER / "README.md").read_text()
LISTED = set(re.findall(r"\]\(([^)#]+)\)", TEXT))


def test_index_lists_every_test_of_this_folder():
    assert {path.name for path in FOLDER.glob("test_law*.py")} <= LISTED


def test_index_lists_only_files_that_exist():
    assert [name for name in sorted(LISTED) if not (FOLDER / name).is_file()] == []


def test_index_has_tests_for_each_of_nine_laws():
    sections = re.split(r"^## Law (\d): ", TEXT, flags=re.MULTILINE)[1:]
    assert sections[::2] == [str(number) for number in range(1, 10)]
    for number, section in zip(sections[::2], sections[1::2], strict=True):
        own = {path.name for path in FOLDER.glob(f"test_law_{number}_*.py")}
        listed = set(re.findall(r"\]\(([^)#]+\.py)\)", section))
        assert listed, number
        assert own <= listed, number
