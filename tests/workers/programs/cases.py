"""Runs cases of law 1 over the workers, each against plain Keras in the same process, and tells which differ in what."""

from tests.laws.cases import CASES
from tests.laws.compare import assert_same, run
from tests.workers.program import config, make_strategy, tell


class Topology:
    """All workers, as the cases want it."""

    def strategy(self):
        return make_strategy(replicas=config["replicas"])


Topology().strategy()  # JAX must not start before.
for case in CASES:
    if case.name in config["names"]:
        found = run(case, Topology())
        try:
            assert_same(found, run(case), case.relative)
        except AssertionError as error:
            tell(**{case.name: str(error)})
        else:
            tell(**{case.name: "the same"})
