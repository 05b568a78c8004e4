"""How the input of ``fit``, ``evaluate`` and ``predict`` reaches the devices."""

import os
from dataclasses import dataclass

from lockstep._errors import OptionError, whole_number

__all__ = ["InputOptions"]


@dataclass(frozen=True)
class InputOptions:
    """How batches reach the devices; the place of ``tf.distribute.InputOptions``, and of ``prefetch`` and ``cache`` of tf.data.

    Args:
        prefetch: number of batches that wait on the devices ahead of the step. A thread of its own reads and places
            them, but for arrays on CPU devices, which are there already. 0: each batch is read when its step is due.
        cache: what becomes of the batches of ``fit`` after the first epoch. None: they are read anew. ``"memory"``: they
            are kept on the host. ``"device"``: they are kept on the devices; arrays lie there as a whole, on each
            device, and are shuffled there, in the order that they would have on the host. A path: they are kept in that
            file. What is kept lasts as long as the call of ``fit``.

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
        object.__setattr__(self, "prefetch", whole_number("InputOptions: prefetch", self.prefetch, least=0))
        cache = self.cache
        if cache is not None and (not isinstance(cache, (str, os.PathLike)) or not os.fspath(cache)):
            raise OptionError(f'InputOptions: cache: expected None, "memory", "device" or a path, got {cache!r}.')
