"""The page of the doctor lists what the code can find, and its code prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "doctor.md").read_text()


def test_every_finding_is_in_the_table_and_no_other():
    code = "\n".join(path.read_text() for path in (ROOT / "src" / "lockstep" / "doctor").glob("*.py"))
    made = set(re.findall(r'(?<!print\()\bFinding\(\s*"([\w-]+)"', code))
    assert made == set(re.findall(r"^\| `([\w-]+)` \|", PAGE, flags=re.MULTILINE))


def test_the_code_prints_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (printed,) = re.findall(r"```\n(softmax-from-logits: .*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace(str(tmp_path), "/home/me") == printed
