"""A worker's threads do not push each other off a core, where nobody has said how they are to be scheduled."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.distributed import jax_init
from lockstep.distributed.jax_init import set_batch_scheduling

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has these policies.")


def policies_after(policy):
    """Of a thread that had ``policy``, and of one that it has started since; the threads of this process keep theirs."""

    def change():
        os.sched_setscheduler(0, policy, os.sched_param(0))
        set_batch_scheduling()
        with ThreadPoolExecutor() as later:
            return os.sched_getscheduler(0), later.submit(os.sched_getscheduler, 0).result()

    with ThreadPoolExecutor() as apart:
        return apart.submit(change).result()


def test_it_holds_for_a_thread_and_for_those_that_it_starts():
    assert policies_after(os.SCHED_OTHER) == (os.SCHED_BATCH, os.SCHED_BATCH)


def test_another_policy_is_kept():
    assert policies_after(os.SCHED_IDLE) == (os.SCHED_IDLE, os.SCHED_IDLE)


@pytest.mark.parametrize("environ", [{"CUDA_VISIBLE_DEVICES": "-1"}, {"JAX_PLATFORMS": "cpu"}], ids=str)
def test_hidden_gpus_leave_the_threads_as_on_a_machine_without(environ, monkeypatch):
    set_policies = []
    monkeypatch.setattr(jax_init, "reserve_threads", lambda devices: None)
    monkeypatch.setattr(jax_init, "set_batch_scheduling", lambda: set_policies.append(True))
    jax_init.prepare_threads(1, environ)
    assert set_policies == [True]
