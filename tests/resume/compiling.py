"""Compiled programs that are kept in a folder, so that the same model is compiled once, however often it is made."""

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache

SETTINGS = {
    "jax_compilation_cache_dir": lambda folder: folder,
    "jax_persistent_cache_min_compile_time_secs": lambda folder: 0,
    "jax_persistent_cache_min_entry_size_bytes": lambda folder: -1,
}


def keep_programs(folder):
    """In ``folder`` from now on, or with None nowhere; gives the settings of before."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    for name, setting in SETTINGS.items():
        jax.config.update(name, setting(folder))
    compilation_cache.reset_cache()
    return before


@contextlib.contextmanager
def programs_kept(folder):
    before = keep_programs(folder)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
