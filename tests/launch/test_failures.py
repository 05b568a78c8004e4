"""Failure reports: headline and traceback, exit code of the job, and the root cause among several failures."""

import dataclasses
import signal

import pytest

from lockstep.launch.rank_assignment import ProcessName
from lockstep.launch.worker_process import ErrorRecord, ProcessFailure, job_exit_code, root_cause
from tests.launch.launching import program, run
from tests.support.marks import every_pair

pytestmark = pytest.mark.waits


@pytest.mark.slow
@pytest.mark.parametrize("code", [1, 7, 75, 124])
def test_the_job_ends_with_the_code_of_the_worker_that_failed(tmp_path, code):
    done = run("-n", 2, program(tmp_path, f"if rank == 1: sys.exit({code})\ntime.sleep(50)"))
    assert done.returncode == code
    assert f"worker 1 ended with exit code {code}" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_signal_is_named_and_counts_as_shells_count(tmp_path, number):
    done = run("-n", 2, program(tmp_path, f"if rank == 1: os.kill(os.getpid(), {number.value})\ntime.sleep(50)"))
    assert done.returncode == 128 + number
    assert f"worker 1 was killed by {number.name} (" in done.stderr
    if number != signal.SIGKILL:
        assert 'program.py", line' in done.stderr.partition("Its last lines:")[2]  # where Python was


def test_the_traceback_of_the_program_stands_last_and_holds_no_line_of_ours(tmp_path):
    code = """
def break_down():
    raise ValueError("no such thing: ä")
if rank == 1:
    break_down()
time.sleep(50)
"""
    done = run("-n", 2, program(tmp_path, code))
    assert done.returncode == 13
    assert done.stderr.endswith('    raise ValueError("no such thing: ä")\nValueError: no such thing: ä\n')
    traceback = done.stderr.partition("Its traceback:\n\n")[2]
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert traceback.count("File ") == 2
    shown = "".join(line.removeprefix("[worker 1] ") + "\n" for line in done.stdout.splitlines())
    assert shown == traceback


def test_an_exception_that_cannot_be_caught_by_exception_counts_too(tmp_path):
    done = run(program(tmp_path, "class Stop(BaseException): pass\nraise Stop('now')"))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (13, "Stop: now")


def test_a_syntax_error_is_shown_as_python_shows_it(tmp_path):
    (tmp_path / "wrong.py").write_text("x = = 1\n")
    done = run(tmp_path / "wrong.py")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (13, "SyntaxError: invalid syntax")


def test_a_missing_module_is_named():
    done = run("-m", "no_such_module")
    assert done.returncode == 13
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'no_such_module' that can be run\n")


def test_an_exit_with_a_message_shows_the_message(tmp_path):
    done = run(program(tmp_path, "sys.exit('no data here')"))
    assert done.returncode == 1
    assert done.stderr.endswith("Its last lines:\n\nno data here\n")


def test_the_programs_own_hook_shows_its_exceptions(tmp_path):
    code = "sys.excepthook = lambda kind, error, traceback: print('mine:', error, traceback.tb_lineno > 1)\nraise OSError('x')"
    done = run(program(tmp_path, code))
    assert done.stdout == "[worker 0] mine: x True\n"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (13, "OSError: x")


@pytest.mark.slow
def test_a_failure_does_not_wait_for_what_runs_at_the_exit_of_python(tmp_path):
    code = """
import atexit, threading
atexit.register(time.sleep, 50)
threading.Thread(target=time.sleep, args=(50,)).start()
raise ValueError
"""
    assert run(program(tmp_path, code)).returncode == 13  # within the deadline of the helper


CONSEQUENCES = ["os._exit(75)", "os._exit(124)", "os._exit(13)"]
CONSEQUENCES += ["from lockstep import ClusterError; raise ClusterError('worker 1 died', 75)"]
CAUSES = ["raise ValueError('the cause')", "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("consequence", "cause", "order"), every_pair(CONSEQUENCES, CAUSES, ("cause first", "consequence first"))
)
def test_the_cause_is_reported_and_not_what_followed_from_it(tmp_path, cause, consequence, order):
    waits = "wait_for(lambda: is_there('process') and has_ended((here / 'process').read_text()))"
    first = (1, 0) if order == "cause first" else (0, 1)
    code = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == {first[1]}:
    {waits}
else:
    write('process', str(os.getpid()))
if rank == 1:
    {cause}
{consequence}
"""
    done = run("-n", 2, program(tmp_path, code))
    assert done.returncode == {"r": 13, "o": 137, "s": 3}[cause[0]], done.stderr
    assert done.stderr.rpartition("lockstep run: ")[2].startswith("worker 1 ")


@pytest.mark.slow
@pytest.mark.parametrize(("value", "code"), [("3", 3), ("'no disk'", 1)])
@pytest.mark.parametrize("consequence", ["raise ValueError('connection closed')", "os._exit(13)"])
def test_an_exit_that_others_do_not_survive_is_the_cause_though_they_have_ended_first(
    tmp_path, value, code, consequence
):
    """JAX's exit handlers close the connections of a worker, and those of the chief wait for the other workers."""
    code_of_workers = f"""
import atexit
if rank == 1:
    atexit.register(lambda: (write("leaving"), time.sleep(50)))
    sys.exit({value})
wait_for(lambda: is_there("leaving"))
{consequence}
"""
    done = run("-n", 2, program(tmp_path, code_of_workers))
    assert done.returncode == code, done.stderr
    assert done.stderr.rpartition("lockstep run: ")[2].startswith(f"worker 1 ended with exit code {code}")


@pytest.mark.slow
def test_an_exit_of_a_process_that_the_program_has_forked_is_not_its_own(tmp_path):
    code = "if not os.fork(): sys.exit(3)\nos.wait()\nraise ValueError('mine')"
    done = run(program(tmp_path, code))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (13, "ValueError: mine")


@pytest.mark.slow
def test_one_that_only_lost_another_ends_the_job_with_its_own_code(tmp_path):
    done = run("-n", 2, program(tmp_path, "if rank == 0: sys.exit(75)\ntime.sleep(50)"))
    assert done.returncode == 75
    assert "another worker was lost, or the job was preempted: try again" in done.stderr


def test_the_others_are_asked_to_end_and_their_own_end_is_no_failure(tmp_path):
    code = """
if rank == 1:
    wait_for(lambda: is_there("ready"))
    raise ValueError("first")
def end(number, frame):
    raise OSError("second")
signal.signal(signal.SIGTERM, end)
write("ready")
time.sleep(50)
"""
    done = run("-n", 2, program(tmp_path, code))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (13, "ValueError: first")
    assert "[worker 0] OSError: second" in done.stdout


def test_a_worker_may_end_long_before_the_others(tmp_path):
    done = run("-n", 2, program(tmp_path, "wait_for(lambda: rank == 1 or is_there('done')); write('done')"))
    assert done.returncode == 0


def test_the_report_ends_with_the_failure_of_another_worker_that_is_written_below_the_traceback():
    cause = "lockstep: worker 1 finished after step 4. Fix: give all workers the same number of epochs."
    record = ErrorRecord(1.0, False, "Traceback\nJaxRuntimeError: connection closed\n")
    failure = ProcessFailure(
        ProcessName("worker", 0), 13, 1.0, record, f"JaxRuntimeError: connection closed\n{cause}\n"
    )
    assert failure.report.endswith(f"connection closed\n{cause}\n")
    assert dataclasses.replace(failure, last_lines="step 4\n").report.endswith("connection closed\n")


@pytest.mark.parametrize("printed", ["", "\n", " \n\n"])
def test_the_report_of_a_worker_that_printed_no_text_says_so(printed):
    report = ProcessFailure(ProcessName("worker", 0), 5, 1.0, None, printed).report
    assert report == "worker 0 ended with exit code 5. It printed nothing.\n"


def test_the_root_cause_several_failures_is_no_consequence():
    def failure(rank, code, when, record=None):
        return ProcessFailure(ProcessName("worker", rank), code, when, record, "")

    ours = ErrorRecord(3.0, False, "ValueError")
    theirs = ErrorRecord(2.0, True, "ClusterError")
    failures = [failure(0, 75, 1.0), failure(1, 13, 3.0, ours), failure(2, 13, 2.0, theirs), failure(3, -9, 4.0)]
    assert root_cause(failures).process.index == 1
    assert root_cause([failures[3], failures[1]]).process.index == 1
    assert root_cause([failures[0], failures[3]]).process.index == 3
    assert root_cause([failures[0], failures[2]]).process.index == 0
    assert [job_exit_code(one.code) for one in failures] == [75, 13, 13, 137]
