"""Workers on machines with addresses of their own, as network namespaces make them: numbers, a cut link, a wrong name."""

import re
import socket
import time

import pytest

from tests.distributed.jobs.outcomes import assert_same_bits, train
from tests.support.networks import Network, why_not
from tests.support.processes import AS_FOR_USERS, ForkServer, Job

pytestmark = [pytest.mark.xdist_group("networks"), pytest.mark.slow]  # /etc/netns is one for the machine.

LONG, SHORT, SOON = 60, 3, 30  # seconds


@pytest.fixture(scope="module")
def machines():
    """A network of two machines, and what starts processes there."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Network(2) as network:
        forks = [ForkServer(network.inside(machine)) for machine in range(2)]
        yield network, forks
        for each in forks:
            each.close()


@pytest.fixture
def network(machines):
    network, _ = machines
    yield network
    for machine in range(2):
        network.mend(machine)


@pytest.fixture
def run(machines, network, tmp_path):
    _, forks = machines
    made = Job(forks, tmp_path, 2, hosts=network.addresses, environ={"LOCKSTEP_SECRET": "known" * 8})
    yield made
    made.clean()


@pytest.mark.nightly
def test_two_machines_have_the_bits_of_one_process(run, alone):
    run.environ |= AS_FOR_USERS
    found, other = train(run, [["cnn_normalized", True]], devices=2)
    assert_same_bits(found, alone("cnn_normalized", devices=1))
    assert_same_bits(other, found)


def test_a_cut_link_ends_both_within_the_limit_and_each_names_the_other(run, network):
    processes = run.start_all("faults", timeout=SHORT)
    for process in processes:
        process.until("training")
    began = time.monotonic()
    network.cut(1)
    assert [process.end() for process in processes] == [75, 75]
    assert max(process.ended_at for process in processes) - began < SHORT + SOON
    for process, other in zip(processes, reversed(processes), strict=True):
        index = processes.index(other)
        last = process.said.splitlines()[-1]
        who = f"worker {index} of 2 ({socket.gethostname()}, process {other.pid}) does not answer: no heartbeat for "
        assert re.search(rf"{re.escape(who)}([3-9]|\d\d) s", last), process.said


@pytest.mark.parametrize("wrong", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_machine_whose_name_leads_back_to_itself_is_named_at_the_start_with_the_cure(run, network, wrong):
    network.lead_name(wrong, "127.0.1.1")
    processes = run.start_all("starts", timeout=LONG)
    assert [process.end() for process in processes] == [13, 13]
    for process in processes:
        last = process.said.splitlines()[-1]
        assert (
            f"worker {wrong} of 2 ({socket.gethostname()}, process {processes[wrong].pid}): the name of its machine"
            in last
        )
        assert "leads to 127.0.1.1 there, which the other machines cannot reach" in last
        assert f"Fix: write the line '{network.addresses[wrong]} {socket.gethostname()}' into /etc/hosts there" in last


def test_processes_of_jax_on_two_machines_agree_on_an_address_and_a_secret(run, network):
    run.environ.pop("LOCKSTEP_SECRET")
    config = {"jax": f"{network.addresses[0]}:8476", "environ": {"TF_CONFIG": ""}, "timeout": LONG}
    assert run.run("starts", **config) == [{"trained": 2}] * 2
    assert "without a secret" not in run.processes["worker0"].said
