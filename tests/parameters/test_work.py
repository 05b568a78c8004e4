"""Pieces of work and those who do them, in every order of events."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lockstep.parameters.work import WorkQueue

WORKERS = st.integers(0, 3)


class Work(RuleBasedStateMachine):
    """The queue beside a naive one: sets of numbers."""

    def __init__(self):
        super().__init__()
        self.queue = WorkQueue()
        self.free, self.held, self.done = set(), {}, set()
        self.is_closed = False

    @rule(count=st.integers(0, 5))
    def add(self, count):
        self.free |= set(range(self.queue.added, self.queue.added + count))
        self.queue.add(count)

    @rule()
    def close(self):
        self.queue.close()
        self.is_closed = True

    @rule(worker=WORKERS)
    def take(self, worker):
        number = self.queue.take(worker)
        assert number == min(self.free, default=None)
        if number is not None:
            self.free.remove(number)
            self.held[number] = worker

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data):
        number = data.draw(st.sampled_from(sorted(self.held)))
        assert self.queue.finish(self.held.pop(number), number)
        self.done.add(number)

    @rule(worker=WORKERS, number=st.integers(0, 20))
    def claim(self, worker, number):
        if self.held.get(number) != worker:
            assert not self.queue.finish(worker, number)

    @rule(worker=WORKERS)
    def lose(self, worker):
        lost = {number for number, holder in self.held.items() if holder == worker}
        assert self.queue.lose(worker) == sorted(lost)
        self.free |= lost
        self.held = {number: holder for number, holder in self.held.items() if holder != worker}

    @invariant()
    def ends_exactly_when_all_is_done(self):
        is_idle = not self.free and not self.held
        assert self.queue.is_idle == is_idle
        assert self.queue.is_over == (is_idle and self.is_closed)
        assert self.queue.held() == self.held
        assert self.queue.added == len(self.free) + len(self.held) + len(self.done)


TestWork = Work.TestCase
TestWork.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(WORKERS, min_size=1, max_size=30))
def test_while_somebody_lives_everything_is_done(lost):
    queue = WorkQueue()
    queue.add(10)
    queue.close()
    for worker in lost:
        queue.take(worker)
        queue.lose(worker)
    done = []
    while (number := queue.take("the last")) is not None:
        assert queue.finish("the last", number)
        done.append(number)
    assert done == list(range(10))
    assert queue.is_over
