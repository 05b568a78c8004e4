"""The version of Lockstep, which the build reads here, and the versions of all packages that determine results."""

import platform

__version__ = "0.1.0"

_PACKAGES = ("keras", "jax", "jaxlib", "numpy")


def used_versions() -> dict[str, str]:
    """Return the versions of Lockstep, Python and the packages that compute, by name."""
    from importlib.metadata import version  # Half of the time that importing Lockstep takes.

    found = {"lockstep": __version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    return found | {name: version(name) for name in _PACKAGES}
