"""How a process ends: what it says, when, and with which code; the end itself is a fake here."""

import io
import sys
import threading
import time
from types import SimpleNamespace, TracebackType

import pytest
from jax.errors import ConcretizationTypeError, JaxRuntimeError

from lockstep import ClusterError
from lockstep.distributed.control.failure_detector import Failure, FailureKind
from lockstep.distributed.control.termination import ExitGuard
from lockstep.distributed.jax_init import ProcessJob
from tests.support.waiting import DEADLINE

DIED = Failure(FailureKind.DIED, 1, "worker 1 of 2 (node1, process 71) died.")
STUCK = Failure(FailureKind.STUCK, 1, "worker 1 of 2 (node1, process 71) is stuck.")
OWN = Failure(FailureKind.FAILED, 0, "worker 0 of 2 (node0, process 70) failed: ValueError: no.")


class FakeSession:
    """Worker 0; ``becomes`` is what the job fails with when this worker says that it has."""

    def __init__(self, becomes):
        self.group, self.failure, self.said, self.may_follow = SimpleNamespace(index=0), None, [], None
        self._becomes = becomes

    def fail(self, summary, *, may_follow):
        self.said.append(summary)
        self.may_follow = may_follow
        self.failure = self.failure or self._becomes


def ending(error, session=None):
    """Exit codes that an exception nobody caught ends with."""
    codes = []
    guard = ExitGuard(session, end=codes.append)
    guard.install()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        guard.restore()
    return codes


@pytest.mark.parametrize(
    ("error", "becomes", "code"),
    [
        (ValueError("no"), OWN, 13),
        (KeyboardInterrupt(), OWN, 130),
        (RuntimeError("connection closed by peer"), DIED, 75),
        (RuntimeError("connection closed by peer"), STUCK, 124),
        (ClusterError("worker 1 died", 75), DIED, 75),
        (ClusterError("the workers do not agree"), OWN, 13),
        (ClusterError("the workers do not agree"), None, 13),
    ],
)
def test_the_code_is_that_of_the_cause(error, becomes, code, capfd):
    session = FakeSession(becomes)
    assert ending(error, session) == [code]
    assert session.said == [f"{type(error).__name__}: {error}".removesuffix(": ")]
    written = capfd.readouterr().err
    assert str(error) in written
    assert (becomes is not None and becomes.sentence in written) == (becomes in (DIED, STUCK))


def raised_from(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "may_follow"),
    [
        (JaxRuntimeError("INTERNAL: Gloo: connection closed by peer"), True),
        (raised_from(ValueError("could not train"), JaxRuntimeError("INTERNAL: Gloo")), True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (ClusterError("worker 1 did not reach the end", 124), True),
        (ValueError("no labels"), False),
        (RuntimeError("no labels"), False),
        (ConcretizationTypeError.__new__(ConcretizationTypeError), False),
    ],
)
def test_an_error_of_the_program_itself_follows_from_no_lost_worker(error, may_follow, capfd):
    session = FakeSession(OWN)
    ending(error, session)
    assert session.may_follow is may_follow


def test_an_error_before_the_workers_have_met_has_its_own_code(capfd):
    assert ending(ClusterError("worker 1 did not join", 75)) == [75]
    assert ending(ValueError("no")) == [13]


def test_a_process_that_catches_the_error_of_its_job_ends_by_itself(monkeypatch, capfd):
    """A program that trains alone after it could not join: only the error of the job itself ends as one of a job."""
    session, codes, seen, error = FakeSession(OWN), [], [], ClusterError("worker 1 did not join", 75)
    session.leave = seen.append
    monkeypatch.setattr(sys, "excepthook", lambda *raised: seen.append(raised[1]))
    guard = ExitGuard(session, grace_seconds=0, end=codes.append)
    guard.install()
    guard.leave_after(error)
    assert session.said == ["ClusterError: worker 1 did not join"]
    assert seen == [0]
    other = ValueError("a later one")
    sys.excepthook(ValueError, other, None)
    assert (codes, seen) == ([], [0, other])
    outer = RuntimeError("could not train")
    outer.__cause__ = error
    sys.excepthook(RuntimeError, outer, None)
    assert codes == [13]
    guard.on_failure(DIED)
    assert codes == [13]


def test_what_was_there_before_is_called_and_given_back(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error))
    before = sys.excepthook
    error = ValueError("no")
    assert ending(error) == [13]
    assert seen == [(ValueError, error, None)]
    assert sys.excepthook is before


def test_a_hook_that_was_put_over_ours_stays_and_ours_does_nothing_more(monkeypatch, capfd):
    codes = []
    guard = ExitGuard(end=codes.append)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    guard.install()
    guard.install()
    ours = sys.excepthook
    sys.excepthook = lambda *error: ours(*error)
    theirs = sys.excepthook
    guard.restore()
    assert sys.excepthook is theirs
    sys.excepthook(ValueError, ValueError("no"), None)
    assert codes == []
    assert "ValueError: no" in capfd.readouterr().err


def uncaught(error):
    """As Python has ``error`` after it has left the outermost frame of the program."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return error.with_traceback(TracebackType(None, frame, 0, 1))


def test_an_exception_that_only_another_hook_got_is_reported_at_the_exit_of_the_process(monkeypatch, capfd):
    session, codes = FakeSession(OWN), []
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    guard = ExitGuard(session, end=lambda code: codes.append(code) or sys.exit(code))
    job = ProcessJob(session, guard)
    guard.install()
    sys.excepthook = lambda *error: None
    monkeypatch.setattr(sys, "last_value", uncaught(ValueError("no")), raising=False)
    with pytest.raises(SystemExit):
        job.leave()
    assert (codes, session.said) == ([13], ["ValueError: no"])
    guard.restore()
    guard.end_after_missed_exception()
    assert codes == [13]


@pytest.mark.parametrize("is_at_top_level", [True, False])
def test_an_exception_that_the_program_has_caught_is_no_reason_to_end(monkeypatch, is_at_top_level):
    """A program may keep it for a debugger, as pytest does."""
    session, codes = FakeSession(OWN), []
    guard = ExitGuard(session, end=codes.append)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    guard.install()
    if not is_at_top_level:  # Its traceback shows that it was caught, also if another hook would have got it.
        sys.excepthook = lambda *error: None
    try:
        raise ValueError("no")
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", uncaught(error) if is_at_top_level else error, raising=False)
    guard.end_after_missed_exception()
    guard.restore()
    assert (codes, session.said) == ([], [])


def test_a_prompt_goes_on_after_an_error(monkeypatch, capfd):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    session = FakeSession(OWN)
    assert ending(ValueError("no"), session) == []
    assert session.said == []
    assert "ValueError: no" in capfd.readouterr().err


def test_a_failure_is_said_first_then_there_is_time_to_unwind_then_comes_the_end(capfd):
    order = []
    guard = ExitGuard(
        grace_seconds=4,
        sleep=lambda seconds: order.append((seconds, capfd.readouterr().err)),
        end=lambda code: order.append(code),
    )
    guard.on_failure(DIED)
    said = f"lockstep: worker 1 of 2 (node1, process 71) died. This process ends with code 75. {DIED.fix}\n"
    assert order == [(4, said), 75]


def test_what_has_become_of_whom_is_said_below_the_traceback(capfd):
    session = FakeSession(DIED)
    guard = ExitGuard(session, grace_seconds=0, end=lambda code: None)
    guard.install()
    try:
        threads = [threading.Thread(target=guard.on_failure, args=(DIED,)) for _ in range(5)]
        for thread in threads:
            thread.start()
        guard.hook(RuntimeError, RuntimeError("closed"), None)
        for thread in threads:
            thread.join(30)
    finally:
        guard.restore()
    said = f"lockstep: worker 1 of 2 (node1, process 71) died. This process ends with code 75. {DIED.fix}"
    *before, last = capfd.readouterr().err.splitlines()
    assert last == said
    assert before.count(said) <= 1  # Where the failure was known before the exception came.


def test_an_error_that_all_workers_raise_alike_is_said_once(capfd):
    error = ClusterError("the workers do not agree")
    sentence = "worker 1 of 2 (node1, process 71) failed: ClusterError: the workers do not agree"
    echo = Failure(FailureKind.FAILED, 1, sentence)
    assert ending(error, FakeSession(echo)) == [13]
    assert capfd.readouterr().err.count("the workers do not agree") == 1


@pytest.mark.parametrize("index", [0, 1])
def test_where_a_worker_is_stuck_each_shows_its_stacks_and_then_says_so(index, capfd):
    session = FakeSession(STUCK)
    session.group.index = index
    ExitGuard(session, grace_seconds=0, end=lambda code: None).on_failure(STUCK)
    written = capfd.readouterr().err
    assert written.splitlines()[-1].startswith("lockstep: worker 1 of 2 (node1, process 71) is stuck.")
    assert "in test_where_a_worker_is_stuck_each_shows_its_stacks_and_then_says_so\n" in written


class Blocked(io.StringIO):
    """As a pipe that is full and that nobody reads."""

    def __init__(self):
        super().__init__()
        self.free = threading.Event()

    def flush(self):
        self.free.wait(60)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.slow
def test_an_output_that_nobody_reads_does_not_hold_the_end(name, monkeypatch):
    blocked, codes = Blocked(), []
    monkeypatch.setattr(sys, name, blocked)
    began = time.monotonic()
    ExitGuard(grace_seconds=0, end=codes.append).on_failure(DIED)
    assert codes == [75]
    assert time.monotonic() - began < 30
    left = [thread for thread in threading.enumerate() if thread.name == "lockstep-exit"]
    assert left
    blocked.free.set()
    for thread in left:
        thread.join(DEADLINE)
        assert not thread.is_alive()


def test_a_process_without_outputs_ends_too(monkeypatch):
    codes = []
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    ExitGuard(grace_seconds=0, end=codes.append).on_failure(DIED)
    assert codes == [75]
