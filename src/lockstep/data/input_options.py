"""Options of prefetching and caching, which strategies and distributed data sets take."""

import os
from dataclasses import dataclass

from lockstep._errors import file_path, instance_of, whole_number


@dataclass(frozen=True)
class InputOptions:
    """Options of prefetching and caching, for ``tf.distribute.InputOptions`` and for ``prefetch`` and ``cache`` of tf.data.

    Args:
        prefetch: number of batches that are placed on the devices ahead of the step. A separate thread reads and places
            them, except arrays on CPU devices and arrays of which a batch has at most 1 MiB, which need neither. 0: each batch is read when its step is due.
        cache: where the batches of the first epoch of ``fit`` are kept for later epochs. None: they are read again.
            ``"memory"``: on the host. ``"device"``: on the devices; arrays are copied whole to each device and shuffled
            there, in the order that they would have on the host. A path: in that file, or, of several workers, each in a file
            of its own, with its number at the end. The cache lasts as long as the call of ``fit``.

    Raises:
        OptionError: one of them is out of its range.

    Example:
        >>> import lockstep
        >>> options = lockstep.InputOptions(prefetch=4, cache="memory")
        >>> strategy = lockstep.MirroredStrategy(input_options=options)
    """

    prefetch: int = 2
    cache: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefetch", whole_number("InputOptions: prefetch", self.prefetch, minimum=0))
        if self.cache is not None:
            file_path("InputOptions: cache", self.cache, 'None, "memory", "device" or a path')


def check_input_options(name: str, options: object) -> InputOptions:
    """Return an argument of a strategy or a data set that must be an InputOptions.

    Raises:
        OptionError: it is something else.
    """
    return instance_of(InputOptions, name, options, "a lockstep.InputOptions or None")
