"""What the documents say is true: code runs, links lead somewhere, commands exist."""

import re
import runpy
import shlex
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

from lockstep import _logging, cli
from lockstep.checkpoint import writer_lock
from lockstep.checkpoint.async_writer import AsyncWriter
from lockstep.cluster_resolver import RESOLVERS
from lockstep.collectives import ALGORITHMS
from lockstep.data import prefetch
from lockstep.distributed.control import handshake, heartbeat
from lockstep.doctor import environment_checks
from lockstep.fit.checkpointing import fit_checkpoint, preemption
from lockstep.launch import local_workers, log_multiplexer, rendezvous_state, supervisor
from lockstep.tools import top
from tests.laws.cases import CASES
from tests.laws.compare import DEVICES, RELATIVE, REPLICAS
from tests.pages import IN_FORKS, blocks_of, names_the_backend_first, text_of
from tests.support.processes import NOT_INHERITED, own_host

ROOT = Path(__file__).parents[1]
WITHOUT_PAGES = (".venv", ".pytest_cache", ".git", "build", "dist")
PAGES = sorted(
    page
    for top in ROOT.iterdir()
    if not top.name.startswith(WITHOUT_PAGES)
    for page in ([top] if top.suffix == ".md" else top.rglob("*.md"))
)


@pytest.fixture(autouse=True)
def _no_backend_is_set(monkeypatch):
    """Who copies a block of code into a file has not set the variable either."""
    monkeypatch.delenv("KERAS_BACKEND")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_results_by_hardware_are_those_recorded():
    made = runpy.run_path(str(ROOT / "docs" / "make_results.py"))
    assert made["PAGE"].read_text() == made["page"](), "Fix: python docs/make_results.py"


def test_the_cheat_sheet_has_every_environment_variable():
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    table = re.findall(r"^\| (`[A-Z].*?) \|", (ROOT / "docs" / "cheat_sheet.md").read_text(), flags=re.MULTILINE)
    listed = set(re.findall(r"LOCKSTEP_[A-Z_]+", "\n".join(table)))
    assert listed == set(re.findall(r"LOCKSTEP_[A-Z_]*[A-Z]", source))


def anchors(page):
    """What GitHub makes of the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = [re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)]
    return {heading.replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_into_a_page_lead_to_a_heading(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
        if not target.startswith("https://"):
            assert anchor in anchors(page.parent / target if target else page), f"{page.name}: {target}#{anchor}"


def commands():
    """The command lines of the pages, without parts that a reader is to fill in."""
    text = "\n".join(page.read_text() for page in PAGES)
    found = re.findall(r"`(lockstep [a-z][^`:]*)`|^(?:\$ )?(lockstep [a-z]+(?: .*)?)$", text, re.MULTILINE)
    return sorted({re.sub(r"[…[\]]| [>|].*| #.*", "", "".join(pair).replace("\n", " ")) for pair in found})


@pytest.mark.parametrize("command", commands())
def test_command_lines_have_commands_and_options_that_exist(command, capsys):
    unknown = []
    try:
        _, unknown = cli._parser().parse_known_args(shlex.split(command)[1:])
    except SystemExit:
        error = capsys.readouterr().err
        assert re.search("are required|expected one argument|invalid int value", error), error  # Left out, or a letter.
    assert not unknown


@pytest.mark.slow
def test_the_code_in_the_readme_runs_as_it_stands(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lockstep: MirroredStrategy: 1 replica on 1 device (cpu:0)" in done.stderr
    assert "Epoch 2/2" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", IN_FORKS)
def test_page_that_runs_in_a_fork_names_the_backend_first(name):
    assert names_the_backend_first("\n".join(blocks_of(name)))


NAMES = 'import os\nos.environ["KERAS_BACKEND"] = "jax"\n'


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (f"{NAMES}import keras", True),
        ("import os\nos.environ.setdefault('KERAS_BACKEND', 'jax')\nimport keras", True),
        (f"{NAMES}from lockstep.cluster_resolver import resolve", True),
        ("import keras", False),
        (f"import keras\n{NAMES}", False),
        (f"def f():\n    from keras import layers\n{NAMES}", False),
        (f"from lockstep import callbacks\n{NAMES}import keras", False),
        ('import os\nif os.name:\n    os.environ["KERAS_BACKEND"] = "jax"\nimport keras', False),
        ('import os\nos.environ["KERAS_BACKEND"] = "torch"\nimport keras', False),
        ("import os\n# os.environ['KERAS_BACKEND'] = 'jax'\nimport keras", False),
        (NAMES, False),
    ],
)
def test_names_the_backend_first_reads_the_order(code, expected):
    assert names_the_backend_first(code) is expected


@pytest.mark.slow
def test_scaling_page_prints_what_to_take_and_writes_a_report(python, tmp_path):
    (code,) = blocks_of("scaling")
    (tmp_path / "measured.py").write_text(code)
    done = python(script="measured.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Take 1 device, batch 64" in done.stdout
    assert (tmp_path / "scaling.html").exists()


@pytest.mark.slow
def test_collectives_page_prints_the_bytes_and_names_the_algorithm(python, tmp_path):
    done = python(code="\n".join(blocks_of("collectives")), cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "252,000,000 bytes in 63 rounds\n"
    assert "gradients: all-reduce by gather_and_add" in done.stderr


def test_page_about_preemptible_machines_shows_what_its_code_prints(capsys):
    page = (ROOT / "docs" / "preemptible.md").read_text()
    code, _ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(code, {})
    assert f"```\n{capsys.readouterr().out}```" in page


@pytest.mark.slow
def test_model_parallel_page_prints_the_layout_and_its_rules_fit_the_model(python, tmp_path):
    code = "\n".join([*blocks_of("model_parallel"), "print(strategy.mesh)"])
    done = python(code=code, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (
        "axis 1 by model            with axis 0 of 'down_0/kernel' (columns, then rows); all-reduce of" in done.stdout
    )
    assert "mesh data 2, model 2 (cpu:0, cpu:1, cpu:2, cpu:3)" in done.stderr


def test_plan_page_prints_a_plan_that_fits(python, tmp_path):
    done = python(code="\n".join(blocks_of("plan")), cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^True \d+$", done.stdout, flags=re.MULTILINE)


def test_sharding_page_prints_the_layout(python, tmp_path):
    done = python(code="\n".join(blocks_of("sharding")), cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"hidden_1/kernel +\(256, 256\) +0.250  0.062 +axis 0 by device  forward, backward\n", done.stdout)


@pytest.mark.slow
def test_determinism_page_prints_a_digest_and_fixes_the_thread_pool(python, tmp_path):
    (code,) = blocks_of("determinism")
    done = python(code=code, cwd=tmp_path, environ=dict.fromkeys(NOT_INHERITED), timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[0-9a-f]{64}\n", done.stdout)
    assert "8 replicas on 2 devices" in done.stderr
    assert "deterministic, on a pool of 16 CPU threads\n" in done.stderr


@pytest.mark.slow
def test_custom_loops_page_trains(python, tmp_path):
    (code,) = blocks_of("custom_loops")
    done = python(code=code, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = (float(number) for number in re.findall(r"loss (\d\.\d+)", done.stdout))
    assert second < first


def test_inputs_page_prints_the_rows_in_order(python, tmp_path):
    (code,) = blocks_of("inputs")
    done = python(code=code, warnings=["ignore"], cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 0, 1, 2, 3, 4]\n"


def test_batch_size_page_prints_the_largest_that_fits(python, tmp_path):
    (code,) = blocks_of("batch_size")
    done = python(code=code, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +512 .*\nLargest that fits: 512, all rows of x", done.stdout, flags=re.MULTILINE)


@pytest.mark.slow
def test_nan_guard_page_prints_what_it_shows(python, tmp_path):
    (code,) = blocks_of("nan_guard")
    done = python(code=code, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    (printed,) = re.findall(r"```\n(NanGuard: .*?)```", text_of("nan_guard"), flags=re.DOTALL)
    assert done.stdout.split() == printed.split()


@pytest.mark.slow
def test_monitoring_page_prints_the_names_that_it_shows_and_writes_its_files(python, tmp_path):
    code, _ = blocks_of("monitoring")  # The second one is run by tests/fit/monitoring/test_trackers.py.
    done = python(code=code, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    (printed,) = re.findall(r"```\n(throughput/.*?\n)```", text_of("monitoring"))
    assert done.stdout.endswith(printed)
    assert (tmp_path / "run" / "status.json").exists()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"train", "validation", "status.json"}


@pytest.mark.slow
def test_central_storage_page_prints_where_the_variables_are(python, tmp_path):
    (code,) = blocks_of("central_storage")
    done = python(code=code, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{2}\n"


@pytest.mark.slow
def test_the_code_about_servers_trains_on_two_workers(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "parameter_servers.md").read_text(), flags=re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, "-m", "lockstep.cli", "run", "--workers", "2", "--servers", "1", "--timeout", "150"]
    done = subprocess.run([*command, "train.py"], capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[chief] 3 epochs, 150 updates\n" in done.stdout
    assert "2 workers, without waiting; variables on 1 server" in done.stdout


@pytest.mark.slow
def test_both_steps_of_the_page_about_coordinators_train_on_two_workers(tmp_path):
    page = (ROOT / "docs" / "coordinator.md").read_text()
    loop, own_gradients = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (trains,) = re.findall(r"^for epoch.*", loop, flags=re.MULTILINE | re.DOTALL)
    own_loop = trains.replace("['loss']", "").replace("epoch {", "own {")
    (tmp_path / "loop.py").write_text("\n".join([loop, "import jax", own_gradients, own_loop]))
    (words,) = re.findall(r"`lockstep (run .*loop\.py)`", page)
    command = [sys.executable, "-m", "lockstep.cli", *words.split()[:-1], "--timeout", "100", "loop.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"\[chief\] \w+ \d: loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 6
    assert losses[0] > losses[2] > losses[5]


@pytest.mark.slow
def test_resume_page_comes_to_the_same_bits(python, tmp_path):
    code = "\n".join([*blocks_of("resume"), "print(float(state) == sum(range(300)))"])
    done = python(code=code, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "resumes from stopped at step 7: epoch 2, after 0 of its steps" in done.stderr
    assert done.stdout == "True\nTrue\n"


def test_several_machines_page_trains_alone_on_one_machine(python, tmp_path):
    code, _ = blocks_of("several_machines")
    done = python(code=code, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Epoch 2/2" in done.stdout
    assert done.stdout.endswith("1 replicas\n")


def test_several_machines_page_adopts_processes_of_jax(forks, tmp_path):
    _, code = blocks_of("several_machines")
    code = code.replace("localhost:8476", f"{own_host()}:8476")
    processes = []
    for index in range(2):
        folder = tmp_path / str(index)
        folder.mkdir()
        processes.append(forks[index].start_python(folder, code=code, arguments=[index], cwd=folder))
    try:
        assert [process.end(120) for process in processes] == [0, 0], [process.said for process in processes]
        for index, process in enumerate(processes):
            assert process.out.read_text().endswith(f"worker {index} of 2\n")
    finally:
        for process in processes:
            process.clean()


def test_the_code_about_clusters_runs_as_it_stands(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(), flags=re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "worker 1 2",
        "<TorchrunClusterResolver: worker 1 of 2, worker 0 at 10.0.0.1:29632, from torchrun>",
        "10.0.0.1:12421",
    ]


def test_every_resolver_is_in_the_table_in_order_with_all_its_variables():
    rows = re.findall(r"^\| .*\|$", (ROOT / "docs" / "clusters.md").read_text(), flags=re.MULTILINE)
    named = re.findall(r"`(\w+ClusterResolver)`", "\n".join(rows))
    assert named == [resolver.__name__ for resolver in RESOLVERS]
    for resolver in RESOLVERS:
        first = next(number for number, row in enumerate(rows) if f"`{resolver.__name__}`" in row)
        own = [rows[first], *(row for row in rows[first + 1 : first + 2] if "| the same |" in row)]
        listed = {name for row in own for name in re.findall(r"`([A-Z]\w+_\w+|RANK)`", row.split("|")[3])}
        assert listed == set(resolver.variables), resolver.__name__


def test_the_page_about_what_is_computed_says_how_exact_law_1_is():
    page = (ROOT / "docs" / "semantics.md").read_text()
    assert (
        f"for {len(CASES)} models, losses, optimizers and options, on {min(REPLICAS)} to {max(REPLICAS)} replicas"
        in page
    )
    assert f"and {min(DEVICES)} to {max(DEVICES)} devices" in page
    exact = {case.relative for case in CASES}
    assert exact == {RELATIVE, 3e-5, 5e-3}
    assert all(f"{relative:.0e}".replace("e-0", "e-") in page for relative in exact)


WORDS = {
    2: "two",
    4: "four",
    5: "five",
    10: "ten",
    60: "a minute",
    600: "ten minutes",
    1800: "half an hour",
    3600: "an hour",
}


@pytest.mark.parametrize(
    ("page", "sentence", "limit"),
    [
        ("several_machines", "All workers must start within {:g} s of each other", heartbeat.TIMEOUT_SECONDS),
        ("several_machines", "detected within `CommunicationOptions(timeout_seconds={:g})`", heartbeat.TIMEOUT_SECONDS),
        ("several_machines", "(data may be loaded) is {word}", heartbeat.LONG_SECONDS),
        ("coordinator", "If no function is finished for {word}", heartbeat.LONG_SECONDS),
        ("waits", "A wait for a batch is logged after {word}", prefetch.PATIENCE),
        ("waits", "for which `fit` waits {:g} s", signature(AsyncWriter).parameters["timeout_seconds"].default),
        ("waits", "or {word} if all workers write their shards", fit_checkpoint._PARTS_SECONDS),
        ("resume", "comes again within {word} seconds is the same request", preemption._ONE_REQUEST),
        ("resume", "on another one after {:g} s", writer_lock._LEASE_SECONDS),
        ("security", "A connection has {:g} seconds for its handshake", handshake.HANDSHAKE_SECONDS),
        ("security", "At most {} connections may be in their handshake", handshake._MAX_HANDSHAKES),
        ("launching", "`lockstep run` sends nothing for {:g} s", rendezvous_state.SILENT_SECONDS),
        ("launching", "The end waits {word} seconds for a reader", supervisor._FLUSH_SECONDS),
        ("launching", "and up to {word} for a slow one", log_multiplexer._MAX_CLOSE_SECONDS),
        ("launching", "All this holds for {word} after the signal", local_workers._SAVE_SECONDS),
        ("doctor", "in parallel and within {word} seconds", environment_checks.LIMIT),
        ("monitoring", "If the file is older than {word} seconds", top.STALE),
        ("troubleshooting", "After {word} seconds a line names", _logging._FIRST_LINE_SECONDS),
    ],
)
def test_a_page_states_the_limit_of_the_code(page, sentence, limit):
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
    assert sentence.format(limit, word=WORDS.get(limit)) in text


def test_every_algorithm_is_explained():
    page = (ROOT / "docs" / "collectives.md").read_text()
    for name, algorithm in ALGORITHMS.items():
        assert f'| `{algorithm.__name__}`, `"{name}"` |' in page


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_commands_that_are_named_exist(page):
    commands = re.findall(r"\./(scripts/[\w-]+)", (ROOT / page).read_text())
    assert commands
    for command in commands:
        assert (ROOT / command).stat().st_mode & 0o111, command


def test_lines_of_prose_have_at_most_100_columns():
    tops = ("docs", "examples", "tests")
    for page in (page for page in PAGES if page.parent == ROOT or page.relative_to(ROOT).parts[0] in tops):
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for line in prose.splitlines():
            breakable = re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)  # Code and links are not broken.
            assert len(breakable) <= 100 or line.startswith("|"), f"{page.relative_to(ROOT)}: {line}"


def test_every_decision_has_its_parts():
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [path.name[:4] for path in decisions] == [f"{number:04}" for number in range(1, len(decisions) + 1)]
    for path in decisions:
        for part in ("**Context.**", "**Choice.**", "**Evidence.**"):
            assert part in path.read_text(), f"{path.name} lacks {part}"
