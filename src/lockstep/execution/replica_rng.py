"""One stored seed, another stream on each replica.

Keras draws from a ``SeedGenerator``, whose state ``(seed, counter)`` is a key of JAX's threefry generator; each draw
adds one to the counter. Replica 0 uses the state as it is, so that one replica draws what plain Keras draws; replica r
uses ``jax.random.fold_in(state, r)``. What a replica draws thus depends on seed, step and replica alone, and the one
state that is stored is that of replica 0. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

import jax
import jax.numpy as jnp

__all__ = ["seed_of_replica"]


def seed_of_replica(state: jax.Array, replica: jax.Array) -> jax.Array:
    """State of a seed generator, ``uint32 (2,)``, as replica number ``replica`` sees it."""
    key = jax.random.wrap_key_data(state, impl="threefry2x32")
    folded = jax.random.key_data(jax.random.fold_in(key, replica))
    return jnp.where(replica == 0, state, folded)
