"""Loaded by interpreters that tests start: they import Keras in half the time, and share compiled programs."""

import importlib.util
import os
import sys

import extras


class BeforeJax:
    """Gives JAX its folder of compiled programs when it is imported, which many interpreters of tests never do."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "jax":
            import shared_programs

            shared_programs.use_in_new_interpreter()
        if name == "jax._src.compiler":
            sys.meta_path.remove(cls)
            return cls.that_has_all_write(importlib.util.find_spec(name))
        return None

    @staticmethod
    def that_has_all_write(spec):
        import shared_programs

        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), shared_programs.have_all_processes_write(module))
        return spec


extras.block()
if "FOLDERS_OF_COMPILED_PROGRAMS" in os.environ:
    sys.meta_path.insert(0, BeforeJax)
