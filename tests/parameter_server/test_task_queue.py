"""Pieces of work and those who do them, in every order of events."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lockstep.parameter_server.task_dispatcher import TaskQueue

WORKERS = st.integers(0, 3)
PATIENCE = 10.0


class Work(RuleBasedStateMachine):
    """The queue beside a naive one: sets of numbers, and who has them since when."""

    def __init__(self):
        super().__init__()
        self.queue = TaskQueue(PATIENCE)
        self.free, self.held, self.done = set(), {}, set()
        self.now = 0.0

    @rule(count=st.integers(0, 5))
    def add(self, count):
        self.free |= set(range(self.queue.added, self.queue.added + count))
        self.queue.add(count)

    @rule(seconds=st.integers(1, 15))
    def time_goes_on(self, seconds):
        self.now += seconds

    @rule(worker=WORKERS)
    def take(self, worker):
        late = {
            number
            for number, since in self.held.items()
            if worker not in since and len(since) == 1 and self.now - min(since.values()) >= PATIENCE
        }
        number = self.queue.take(worker, self.now)
        assert number == min(self.free or late, default=None)
        if number is not None:
            self.free.discard(number)
            self.held.setdefault(number, {})[worker] = self.now

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data):
        number = data.draw(st.sampled_from(sorted(self.held)))
        worker = data.draw(st.sampled_from(sorted(self.held.pop(number))))
        assert self.queue.finish(worker, number)
        self.done.add(number)

    @rule(worker=WORKERS, number=st.integers(0, 20))
    def claim(self, worker, number):
        if worker not in self.held.get(number, ()):
            assert not self.queue.finish(worker, number)

    @rule(worker=WORKERS)
    def lose(self, worker):
        lost = {number for number, since in self.held.items() if list(since) == [worker]}
        assert self.queue.release(worker) == sorted(lost)
        self.free |= lost
        for since in self.held.values():
            since.pop(worker, None)
        self.held = {number: since for number, since in self.held.items() if since}

    @invariant()
    def is_idle_exactly_when_all_is_done(self):
        assert self.queue.is_idle == (not self.free and not self.held)
        assert self.queue.assignments() == {number: list(since) for number, since in self.held.items()}
        assert self.queue.added == len(self.free) + len(self.held) + len(self.done)


TestWork = Work.TestCase
TestWork.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(WORKERS, min_size=1, max_size=30))
def test_all_tasks_are_done_while_one_worker_lives(lost):
    queue = TaskQueue()
    queue.add(10)
    for worker in lost:
        queue.take(worker)
        queue.release(worker)
    done = []
    while (number := queue.take("the last")) is not None:
        assert queue.finish("the last", number)
        done.append(number)
    assert done == list(range(10))
    assert queue.is_idle


def test_an_overdue_task_is_assigned_twice_and_counts_once():
    queue = TaskQueue(PATIENCE)
    queue.add(2)
    assert queue.take("stuck", 0.0) == 0
    assert queue.take("quick", PATIENCE) == 1  # What nobody has comes first.
    assert queue.take("stuck", PATIENCE) is None  # It has that already.
    assert queue.take("quick", PATIENCE) == 0
    assert queue.take("third", 5 * PATIENCE) == 1
    assert queue.take("fourth", 5 * PATIENCE) is None  # Two have each of them.
    assert queue.finish("quick", 0)
    assert not queue.finish("stuck", 0)
    assert queue.release("stuck") == []
    assert queue.release("quick") == []  # The third has it, too.
    assert queue.release("third") == [1]
