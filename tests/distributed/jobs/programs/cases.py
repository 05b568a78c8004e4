"""Runs cases of law 1 over the workers; tells a digest of what each leaves, and the chief where it differs from plain Keras."""

import hashlib

import jax
import numpy as np

from tests.distributed.jobs.program import config, make_strategy, tell
from tests.laws.cases import case_named
from tests.laws.compare import assert_same, run


class Topology:
    """All workers, as the cases want it."""

    def strategy(self):
        return make_strategy(replicas=config["replicas"])


Topology().strategy()  # JAX must not start before.
compared, digests = {}, {}
for case in map(case_named, config["names"]):
    found = run(case, Topology(), config["only_fit"])
    left = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(vars(found)))
    digests[case.name] = hashlib.sha256(left).hexdigest()
    if config["index"] == 0:
        try:
            assert_same(found, run(case, only_fit=config["only_fit"]), case.relative)
        except AssertionError as error:
            compared[case.name] = str(error)
        else:
            compared[case.name] = "the same"
tell(compared=compared, digests=digests)
