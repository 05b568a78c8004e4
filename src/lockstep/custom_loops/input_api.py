"""How values and data come to the replicas of a loop of one's own, with the names of ``tf.distribute.Strategy``."""

from collections.abc import Callable
from typing import Any

import jax

from lockstep._errors import OptionError
from lockstep.custom_loops.distributed_dataset import DistributedDataset, InputContext, ValueContext
from lockstep.custom_loops.per_replica import of_replicas
from lockstep.custom_loops.per_replica_dataset import PerReplicaDataset
from lockstep.custom_loops.replica_context import refuse_in_replica
from lockstep.custom_loops.value_checks import check_structures
from lockstep.data.device_placement import Placement
from lockstep.data.fit_entry import InputOptions, ProcessGroup
from lockstep.data.sources import make_tree_source

__all__ = ["InputApi"]


class InputApi:
    """Base of :class:`~lockstep.custom_loops.strategy_api.StrategyApi`: give every replica its own."""

    _placement: Placement
    _input_options: InputOptions
    _process_group: ProcessGroup

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """One value for each replica.

        Args:
            value_fn: given a :class:`ValueContext`, returns a tree of arrays.

        Returns:
            The tree, with a :class:`PerReplica` for each array.

        Raises:
            InputError: the trees differ from replica to replica, or hold something that is no number.
        """
        refuse_in_replica("experimental_distribute_values_from_function")
        count = self._placement.replicas
        trees = [value_fn(ValueContext(replica, count)) for replica in range(count)]
        check_structures("experimental_distribute_values_from_function", trees)
        return jax.tree.map(lambda *values: of_replicas(values, self._placement), *trees)

    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Cut the batches of a data set into replicas, in a thread ahead of the loop.

        Args:
            dataset: batches of the *global* size: any iterable of trees of arrays ``(rows, …)``, such as a list, a generator, a
                ``tf.data.Dataset``, a torch ``DataLoader`` or a Grain data set; a ``keras.utils.PyDataset``; or a function of the
                number of the step, whose end is None.
            options: how far ahead to read, by default as the strategy's ``input_options`` say.

        Returns:
            An iterable of trees of :class:`PerReplica`. Replicas get ``ceil(rows / replicas)`` rows each, in order; the last
            ones may get fewer, or none. ``fit``, ``evaluate`` and ``predict`` take it, too.

        Raises:
            InputError: it is no data set; or, while it is iterated, a batch has no rows, or arrays of different lengths.
            OptionError: the options ask for a cache, which is for ``fit``.

        Example:
            >>> import lockstep, numpy as np
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
            >>> data = strategy.experimental_distribute_dataset([np.arange(3), np.arange(2)])
            >>> [[len(rows) for rows in batch.values] for batch in data]
            [[2, 1], [1, 1]]
        """
        refuse_in_replica("experimental_distribute_dataset")
        source = make_tree_source(dataset)
        check = self._process_group.make_batch_check(source.name, source.num_batches is not None)
        return DistributedDataset(source, self._placement, self._ahead(options), check)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Each replica draws a batch of its own, in a thread ahead of the loop.

        Args:
            dataset_fn: given an :class:`InputContext`, returns batches of the size of *one replica*, of any kind that
                :meth:`experimental_distribute_dataset` takes. Each process calls it and draws for its own replicas.
            options: how far ahead to read, by default as the strategy's ``input_options`` say.

        Returns:
            An iterable; each of its elements holds the next batch for every replica. Where the input ends in the middle, the
            replicas without a batch get one of 0 rows. ``fit`` takes it, too: there, the rows of all are one global batch.

        Raises:
            InputError: the function returned no data set.
            OptionError: the options ask for a cache, which is for ``fit``.

        Example:
            >>> import lockstep, numpy as np
            >>> strategy = lockstep.MirroredStrategy(["cpu:0"], replicas=2)
            >>> data = strategy.distribute_datasets_from_function(lambda context: [np.zeros(3), np.ones(3)])
            >>> [[float(rows.mean()) for rows in batch.values] for batch in data]
            [[0.0, 1.0]]
        """
        refuse_in_replica("distribute_datasets_from_function")
        process_group = self._process_group
        context = InputContext(process_group.processes, process_group.process, self._placement.replicas)
        source = make_tree_source(dataset_fn(context))
        return PerReplicaDataset(
            source, self._placement, self._ahead(options), process_group.make_batch_gather(source.name)
        )

    def _ahead(self, options: InputOptions | None) -> int:
        if options is not None and not isinstance(options, InputOptions):
            raise OptionError(f"options: expected a lockstep.InputOptions or None, got {options!r}.")
        if options is not None and options.cache is not None:
            raise OptionError(
                f"InputOptions(cache={str(options.cache)!r}) is for fit. In a loop of your own, keep the batches of the first epoch."
            )
        return (self._input_options if options is None else options).prefetch
