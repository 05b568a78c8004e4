"""One program is translated: rules in their order, each on what the one before has left, then marks."""

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lockstep.tools.migrate import imports, logical_devices, multi_worker_rules, rewrite_rules
from lockstep.tools.migrate.edits import Edit, SourceText
from lockstep.tools.migrate.name_resolution import ImportBindings, imports_of_ours
from lockstep.tools.migrate.todo_comments import TodoComment, marked, marks

__all__ = ["Translation", "translate"]

Rule = Callable[[SourceText, ImportBindings], Iterable[Edit]]

# Those that look at TensorFlow's names come before names are translated; imports come last, as they see what is still used.
RULES: tuple[Rule, ...] = (
    logical_devices.logical_devices,
    logical_devices.memory_growth,
    rewrite_rules.activations,
    rewrite_rules.reductions,
    rewrite_rules.one_device,
    rewrite_rules.sums,
    rewrite_rules.batch_normalization,
    rewrite_rules.old_arguments,
    rewrite_rules.methods,
    rewrite_rules.resets,
    rewrite_rules.cached_last,
    rewrite_rules.logits,
    rewrite_rules.whole_numbers,
    multi_worker_rules.task_from_outside,
    multi_worker_rules.shuffled_alike,
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
    marks: tuple[TodoComment, ...]

    @property
    def modules(self) -> set[str]:
        """The first words of what the new program imports."""
        found = [node for node in ast.walk(ast.parse(self.after)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [
            node.module or "" if isinstance(node, ast.ImportFrom) else one.name for node in found for one in node.names
        ]
        return {name.partition(".")[0] for name in names}


def translate(text: str, path: str = "script.py", *, for_workers: bool = False) -> Translation:
    r"""Translate a program for ``tf.distribute`` and ``tf.keras`` into one for Lockstep and Keras 3.

    Args:
        text: of the program.
        path: of its file, for messages.
        for_workers: whether several workers run it, though it does not say so itself.

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
    source = SourceText(text, path, for_workers)
    if not list(imports_of_ours(source)):
        return Translation(text, text, ())
    for rule in RULES:
        source = source.with_edits(rule(source, ImportBindings(source)))
    found = marks(source, ImportBindings(source))
    source = marked(source, found)
    return Translation(text, source.text, tuple(marks(source, ImportBindings(source))))
