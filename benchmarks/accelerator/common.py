"""What checks and measurements share: findings, training, and comparing."""

import dataclasses
import hashlib
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import numpy as np

import lockstep
from accelerator.nets import compiled

ROWS, UNEVEN = 64, 67  # of a batch; and of one that no number of replicas but one divides
ROWS_LM, UNEVEN_LM = 8, 11  # of a language model, whose logits are large


@dataclasses.dataclass
class Finding:
    """One number that was measured.

    Attributes:
        what: what it is the number of.
        value: the number, or a short text.
        limit: the largest value that is right; None: a measurement without a limit.
    """

    what: str
    value: object
    limit: float | None = None

    @property
    def is_right(self):
        """Whether it is within its limit."""
        return self.limit is None or (isinstance(self.value, (int, float)) and self.value <= self.limit)


def device_names(count=1):
    """Names of the first devices, as strategies take them."""
    platform = "gpu" if jax.local_devices()[0].platform in ("cuda", "rocm", "gpu") else jax.local_devices()[0].platform
    return [f"{platform}:{number}" for number in range(count)]


def trained(net, small, strategy=None, epochs=2, **options):
    """Weights after training with even batches, and a last one that is uneven; plain Keras without a strategy."""
    rows, uneven = (ROWS_LM, UNEVEN_LM) if net == "LM" else (ROWS, UNEVEN)
    if strategy is None:
        model, batch = compiled(net, small, **options)
    else:
        with strategy.scope():
            model, batch = compiled(net, small, **options)
    model.fit(*batch(2 * rows + uneven), batch_size=rows, epochs=epochs, verbose=0)
    return model.get_weights()


def difference(weights, others):
    """Largest difference between two lists of weights, relative to the largest weight of each array.

    An array that is below 1e-9 in both lists is zero with rounding, as the bias of an attention's keys is, whose gradient is zero.
    """
    return max(relative_difference(one, other) for one, other in zip(weights, others, strict=True) if one.size)


def relative_difference(one, other):
    """Largest difference of two arrays, relative to the largest entry of ``other``."""
    if not np.isfinite(one).all():
        return float("inf")
    if max(np.abs(one).max(), np.abs(other).max()) < 1e-9:
        return 0.0
    return float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-6))


def digest(weights):
    """SHA-256 of weights."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(weight).tobytes() for weight in weights)).hexdigest()


def replicas_on_one(replicas, **options):
    """A strategy with some replicas on the first device."""
    return lockstep.MirroredStrategy(device_names(), replicas=replicas, **options)
