"""A loop of one's own over several workers: what each tool of the strategy gives on this one."""

import os

import numpy as np

from tests.custom_loops.tools_used import brought_together, drawn, dtypes, left_and_read_on, padded, trained
from tests.distributed.jobs.program import config, make_strategy, tell

strategy = make_strategy(replicas=4)
found = brought_together(strategy) | {f"trained {n}": value for n, value in enumerate(trained(strategy))}
np.savez(os.path.join(config["folder"], f"{config['name']}.npz"), **found)
local = strategy.experimental_local_results(
    strategy.experimental_distribute_values_from_function(lambda own: own.replica_id_in_sync_group)
)
(uneven,) = strategy.experimental_distribute_dataset([np.arange(5)])
rows = [np.asarray(value).tolist() for value in strategy.experimental_local_results(uneven)]
tell(own=[int(value) for value in local], uneven=rows, drawn=drawn(strategy))
tell(padded=padded(strategy), left=left_and_read_on(strategy), dtypes=dtypes(strategy))
