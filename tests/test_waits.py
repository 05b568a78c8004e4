"""Each wait of the package has a limit in its call, or a row in the table of docs/waits.md that says what ends it.

A wait is found by its name in the syntax tree, so it does not matter of which class the object is.
"""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lockstep"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
PAGE = (ROOT / "docs" / "waits.md").read_text()
ROW = re.compile(r"^\| `([\w/.]+)` \| `([^`]+)`(?:, (\d+) times)? \| .+ \| .+ \|$", re.MULTILINE)
ROWS = {(file, code): int(count or 1) for file, code, count in ROW.findall(PAGE)}  # How many waits each row is about.

# How many positional arguments a call has before its limit; the limit may also be the keyword ``timeout``.
LIMIT_AFTER = {
    **dict.fromkeys(("join", "wait", "result", "exception", "communicate", "poll", "acquire", "get"), 0),
    "wait_for": 1,
    "select": 0,
}
# Whether these end in time is not seen in the call: it depends on the socket, the descriptor or the work.
ALWAYS = {"recv", "recv_into", "recvfrom", "recvmsg", "accept", "sendall", "lockf", "flock", "waitpid", "sigwait"}
AT_ONCE = ("LOCK_NB", "WNOHANG")
WITH_KEYWORD = {"subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"}
FREE = {"select.poll", "sys.exception"}  # The first makes an object that waits when it is polled.
POOL = "ThreadPoolExecutor"  # Its block waits for all threads.
NAMES = {POOL, *LIMIT_AFTER, *ALWAYS, *(whole.rpartition(".")[2] for whole in WITH_KEYWORD)}
_LONGEST = 40  # characters of the arguments of a call in the table


@functools.cache
def nodes_of(text):
    """Return all nodes of the syntax tree of a source text."""
    return list(ast.walk(ast.parse(text)))


@functools.cache
def context_variables():
    """Names of ContextVars, whose ``get()`` is no wait."""
    found = set()
    for text in SOURCES.values():
        for node in nodes_of(text) if "ContextVar" in text else ():
            value = getattr(node, "value", None)
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "ContextVar":
                found.add(ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target))
    return found


def is_limited(call):
    """Whether a call of a method in LIMIT_AFTER has a limit that is not None, or returns at once."""
    name, keywords = call.func.attr, {keyword.arg: keyword.value for keyword in call.keywords}
    if ast.unparse(call.func) == "select.select":
        limits = call.args[3:]
    else:
        limits = [
            *call.args[LIMIT_AFTER[name] :],
            *(keywords[key] for key in ("timeout", "blocking") if key in keywords),
        ]
    values = [
        value for limit in limits for value in ([limit.body, limit.orelse] if isinstance(limit, ast.IfExp) else [limit])
    ]
    return bool(limits) and not any(isinstance(value, ast.Constant) and value.value is None for value in values)


def code_of(call):
    """Return a call as the table shows it: long arguments, and those of a call that it is a method of, are left out."""
    arguments = ast.unparse(call)[len(ast.unparse(call.func)) + 1 : -1]
    function = ast.unparse(call.func)
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
        function = f"{ast.unparse(call.func.value.func)}(…).{call.func.attr}"
    return f"{function}({arguments if len(arguments) <= _LONGEST else '…'})"


def calls_in(text):
    return [node for node in nodes_of(text) if isinstance(node, ast.Call)]


def unlimited_waits(text, contexts=frozenset()):
    """Return the calls of a source text that may wait without limit, as code."""
    found = []
    for node in calls_in(text):
        if getattr(node.func, "attr", getattr(node.func, "id", "")) not in NAMES:
            continue
        whole = ast.unparse(node.func)
        receiver, _, name = whole.rpartition(".")
        if (
            whole in FREE
            or (name == "get" and receiver in contexts)
            or any(word in ast.unparse(node) for word in AT_ONCE)
        ):
            continue
        if (
            name == POOL
            or (receiver and name in ALWAYS)
            or (receiver and name in LIMIT_AFTER and not is_limited(node))
            or (whole in WITH_KEYWORD and "timeout" not in {keyword.arg for keyword in node.keywords})
        ):
            found.append(code_of(node))
    return found


def locks(text):
    """Return the locks that ``with`` takes in a source text."""
    items = [item for node in nodes_of(text) if isinstance(node, ast.With) for item in node.items]
    taken = (
        part for item in items for part in ast.walk(item.context_expr) if isinstance(part, (ast.Name, ast.Attribute))
    )
    names = {ast.unparse(part) for part in taken}
    return sorted(name for name in names if name.rpartition(".")[2].endswith("lock"))


@pytest.mark.parametrize("name", SOURCES)
def test_each_wait_has_a_limit_or_a_row(name):
    waits = Counter(unlimited_waits(SOURCES[name], context_variables()) + locks(SOURCES[name]))
    missing = [code for code, count in waits.items() if ROWS.get((name, code), 0) < count]
    assert not missing, f"{name}: give each of these a limit, or a row in docs/waits.md: {missing}"


@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_about_a_wait(row):
    file, code = row
    assert code in [*map(code_of, calls_in(SOURCES[file])), *locks(SOURCES[file])]


@pytest.mark.parametrize("name", [name for name, text in SOURCES.items() if "Thread(" in text])
def test_threads_keep_no_process_alive(name):
    threads = [call for call in calls_in(SOURCES[name]) if ast.unparse(call.func) in ("Thread", "threading.Thread")]
    assert threads
    assert all("daemon=True" in ast.unparse(call) for call in threads)


def test_no_row_is_there_twice():
    assert len(ROWS) == len(ROW.findall(PAGE)) > 0


@pytest.mark.parametrize(
    ("code", "waits"),
    [
        ("thread.join()", True),
        ("thread.join(None)", True),
        ("thread.join(timeout=None if soon else 3)", True),
        ("thread.join(3)", False),
        ("', '.join(names)", False),
        ("event.wait()", True),
        ("event.wait(timeout=3)", False),
        ("changed.wait_for(ready)", True),
        ("changed.wait_for(ready, 3)", False),
        ("queue.get()", True),
        ("names.get('a')", False),
        ("lock.acquire()", True),
        ("lock.acquire(blocking=False)", False),
        ("os.waitpid(-1, 0)", True),
        ("os.waitpid(-1, os.WNOHANG)", False),
        ("ThreadPoolExecutor(3)", True),
        ("select.select([], [stream], [])", True),
        ("select.select([], [stream], [], 0)", False),
        ("selector.select()", True),
        ("listener.accept()", True),
        ("connected.recv(10)", True),
        ("subprocess.run(command)", True),
        ("subprocess.run(command, timeout=3)", False),
    ],
)
def test_waits_are_found(code, waits):
    assert bool(unlimited_waits(code)) == waits
