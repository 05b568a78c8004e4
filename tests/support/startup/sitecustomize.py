"""Loaded by interpreters that tests start: they import Keras in half the time, and share compiled programs."""

import os
import sys

import extras


class BeforeJax:
    """Gives JAX its folder of compiled programs when it is imported, which many interpreters of tests never do."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "jax":
            sys.meta_path.remove(cls)
            import shared_programs

            shared_programs.use_in_new_interpreter()


extras.block()
if "FOLDERS_OF_COMPILED_PROGRAMS" in os.environ:
    sys.meta_path.insert(0, BeforeJax)
