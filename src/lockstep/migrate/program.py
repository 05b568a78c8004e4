"""One program is translated: rules in their order, each on what the one before has left, then marks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lockstep.migrate import devices, imports, rules
from lockstep.migrate.bindings import Bindings, imports_of_ours
from lockstep.migrate.marks import Mark, marked, marks
from lockstep.migrate.source import Edit, Source

__all__ = ["Translation", "translate"]

Rule = Callable[[Source, Bindings], Iterable[Edit]]

# Those that look at TensorFlow's names come before names are translated; imports come last, as they see what is still used.
RULES: tuple[Rule, ...] = (
    devices.logical_devices,
    devices.memory_growth,
    rules.activations,
    rules.reductions,
    rules.one_device,
    rules.batch_normalization,
    rules.old_arguments,
    rules.methods,
    rules.cached_last,
    rules.logits,
    imports.names,
    imports.imports,
)


@dataclass(frozen=True)
class Translation:
    """What has become of a program.

    Args:
        before: its text.
        after: its new text.
        marks: what is left to be done by hand, with the lines of ``after``.
    """

    before: str
    after: str
    marks: tuple[Mark, ...]


def translate(text: str, path: str = "script.py") -> Translation:
    r"""Translate a program for ``tf.distribute`` and ``tf.keras`` into one for Lockstep and Keras 3.

    Args:
        text: of the program.
        path: of its file, for messages.

    Raises:
        OptionError: it is not Python.

    Example:
        >>> print(translate("import tensorflow as tf\nstrategy = tf.distribute.MirroredStrategy()").after)
        import os
        <BLANKLINE>
        os.environ.setdefault("KERAS_BACKEND", "jax")  # Before Keras is imported.
        <BLANKLINE>
        import lockstep
        strategy = lockstep.MirroredStrategy()
    """
    source = Source(text, path)
    if not list(imports_of_ours(source)):
        return Translation(text, text, ())
    for rule in RULES:
        source = source.with_edits(rule(source, Bindings(source)))
    found = marks(source, Bindings(source))
    source = marked(source, found)
    return Translation(text, source.text, tuple(marks(source, Bindings(source))))
