"""Some cells of the matrix of faults; ``benchmarks/faults.py`` runs all."""

import functools

import pytest

from tests.faults.matrix import IMPOSSIBLE, PHASES, ROLES, SIGNALS, Cell, cells, run, undisturbed

pytestmark = pytest.mark.xdist_group(__name__)


@pytest.fixture(scope="module")
def expected(forks, tmp_path_factory):
    """The digest of an undisturbed job: with servers, or of workers, whoever starts them."""
    found = functools.cache(lambda job: undisturbed(forks, tmp_path_factory.mktemp("undisturbed"), job))
    return lambda job: found("servers" if job == "servers" else "workers")


@pytest.mark.parametrize(
    "cell",
    [
        Cell("workers", "worker", "SIGINT", "step"),
        Cell("servers", "worker", "SIGKILL", "after a push"),
        *(
            pytest.param(cell, marks=pytest.mark.slow)
            for cell in (
                Cell("workers", "chief", "SIGTERM", "compile"),
                Cell("servers", "chief", "SIGSTOP", "checkpoint"),
                Cell("launcher", "supervisor", "SIGTERM", "end"),
                Cell("workers", "worker", "SIGKILL", "rendezvous"),
            )
        ),
        *(
            pytest.param(cell, marks=pytest.mark.nightly)
            for cell in (
                Cell("servers", "parameter server", "SIGKILL", "step"),
                Cell("nodes", "host of the rendezvous", "SIGKILL", "rendezvous"),
            )
        ),
    ],
    ids=lambda cell: cell.key,
)
def test_a_signal_in_a_phase_ends_the_job_in_its_limit_or_changes_nothing(cell, forks, expected, tmp_path):
    found = run(forks, tmp_path, cell, expected(cell.job))
    assert not found["wrong"], found


def test_the_matrix_has_each_signal_to_each_role_in_each_phase():
    found = {cell.key for job in ROLES for cell in cells(job)}
    assert len(found) == sum(map(len, ROLES.values())) * len(SIGNALS) * len(PHASES)
    assert all(role in ROLES[job] and phase in PHASES for job, role, phase in IMPOSSIBLE)
