"""The page of the doctor lists what the code can find, and its code prints what it says."""

import re
from pathlib import Path

from tests.pages import blocks_of, text_of

ROOT = Path(__file__).parents[2]
PAGE = text_of("doctor")


def test_doctor_page_lists_every_finding_and_no_other():
    code = "\n".join(path.read_text() for path in (ROOT / "src" / "lockstep" / "doctor").glob("*.py"))
    made = set(re.findall(r'(?<!print\()\bFinding\(\s*"([\w-]+)"', code))
    assert made == set(re.findall(r"^\| `([\w-]+)` \|", PAGE, flags=re.MULTILINE))


def test_doctor_page_prints_what_it_shows(python, tmp_path, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND")
    (code,) = blocks_of("doctor")
    (printed,) = re.findall(r"```\n(softmax-from-logits: .*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    done = python(script="train.py", cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace(str(tmp_path), "/home/me") == printed
