"""Whether ``shuffle``, ``cache`` and ``prefetch`` come in an order that lets each do its work."""

from collections.abc import Iterator
from itertools import pairwise

import keras

from lockstep._keras import adapters
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall

__all__ = ["about_kept_order", "about_order"]


def about_kept_order(program: FitCall) -> Iterator[Finding]:
    """About a cache of ours that keeps batches whose order should change."""
    cache, shuffle = program.setting.input_options.cache, program.arguments.get("shuffle", True)
    if cache and shuffle and isinstance(program.x, keras.utils.PyDataset):
        yield Finding(
            "cache-freezes-order",
            "the cache keeps the batches of its PyDataset in the order of the first epoch, though shuffle=True",
            f"InputOptions(cache={str(cache)!r}), {program.at_fit}",
            "from the second epoch on the model sees the same order again",
            "Say shuffle=False where that is meant, or leave out the cache",
        )


def about_order(program: FitCall) -> Iterator[Finding]:
    """About ``shuffle``, ``cache`` and ``prefetch`` of a ``tf.data.Dataset`` in an order that defeats them."""
    if not adapters.is_tf_dataset(program.x):
        return
    try:  # The tree that tf.data shows for debugging, one line each, from the last step to the first; it may be missing.
        shown = program.x.__debug_string__()
    except AttributeError:
        return
    chain = [line.lstrip("-<_").partition("Dataset")[0] for line in shown.splitlines()]
    shuffles = [number for number, name in enumerate(chain) if name == "Shuffle"]
    if "Cache" in chain and shuffles and shuffles[0] > chain.index("Cache"):  # None comes after the cache.
        yield Finding(
            "shuffle-before-cache",
            "its tf.data.Dataset caches what it has shuffled",
            program.at_fit,
            "every epoch has the order of the first",
            "Put cache() before shuffle()",
        )
    if ("Cache", "Prefetch") in pairwise(chain):
        yield Finding(
            "prefetch-before-cache",
            "its tf.data.Dataset caches what it has prefetched",
            program.at_fit,
            "nothing is read ahead of the step",
            "Put prefetch() last",
        )
