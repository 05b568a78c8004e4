"""Options that the programs of steps are compiled with."""

import functools

import jax

__all__ = ["compiler_options"]

# XLA's own routine for convolutions on CPUs is faster than that of YNNPACK, which jaxlib 0.10 takes for some of them: see
# docs/decisions/0028. Products of matrices stay with the latter.
_ON_CPUS = {"xla_cpu_experimental_ynn_fusion_type": "-individual_convolution"}


@functools.cache
def compiler_options(platform: str) -> dict[str, str]:
    """For ``jax.jit``; empty where this version of XLA does not know them.

    Args:
        platform: of the devices, "cpu" for example.
    """
    if platform != "cpu":
        return {}
    number = jax.device_put(1.0, jax.local_devices(backend="cpu")[0])
    try:
        jax.jit(lambda x: x, compiler_options=_ON_CPUS).lower(number).compile()
    except (jax.errors.JaxRuntimeError, TypeError):
        return {}
    return _ON_CPUS
