"""The page on KerasHub, and the example that goes with it, run as a user runs them."""

import re
from pathlib import Path

from tests.pages import blocks_of

from . import kit

assert kit.keras_hub  # Without KerasHub nothing here runs.
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_lora.py"


def test_kerashub_page_trains(python, tmp_path):
    done = python(code="\n".join(blocks_of("kerashub")), warnings=["ignore"], cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    first, share = done.stdout.splitlines()
    assert re.fullmatch(r"\['.*/lora_kernel_a', '.*/lora_kernel_b'\]", first)
    assert share == "0.50"


def test_example_fine_tunes_and_writes(python, tmp_path):
    arguments = ["--strategy", "map", "--epochs", "3", "--save", str(tmp_path / "preset")]
    done = python(script=EXAMPLE, arguments=arguments, warnings=["ignore"], cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "numbers are trained" in done.stdout
    assert re.search("^the quick", done.stdout, flags=re.MULTILINE)
    first, *_, last = (float(loss) for loss in re.findall(r"loss: (\d+\.\d+)", done.stdout))
    assert last < first
    assert (tmp_path / "preset" / "config.json").exists()
