"""All checks, in the order in which their findings are told: what makes the result wrong stands before what makes it slow.

A check is a function of a :class:`FitCall` that yields findings, costs little, and changes nothing.
"""

from collections.abc import Callable, Iterable, Mapping

from lockstep.doctor.batch_size_check import about_few_rows, about_normalization
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall
from lockstep.doctor.labels_check import (
    about_finite_inputs,
    about_finite_labels,
    about_form_of_labels,
    about_range_of_labels,
)
from lockstep.doctor.loss_check import about_logits
from lockstep.doctor.mixed_precision import about_loss_scale
from lockstep.doctor.pipeline_order import about_kept_order, about_order
from lockstep.doctor.runtime_env import (
    about_allocator,
    about_devices_and_cores,
    about_thread_pool,
    about_versions,
)

__all__ = ["ABOUT_BATCHES", "ABOUT_THE_CALL", "ABOUT_THE_PROCESS", "Check", "findings_of"]

Check = Callable[[FitCall], Iterable[Finding]]

# What a batch alone shows, too: of an input that does not lie in memory the first one is looked at.
ABOUT_BATCHES: tuple[Check, ...] = (
    about_form_of_labels,  # First, as Keras stops there with an error about shapes.
    about_finite_labels,  # NaN reaches all weights in one step.
    about_finite_inputs,
    about_range_of_labels,
    about_few_rows,
    about_normalization,
)

ABOUT_THE_CALL: tuple[Check, ...] = (
    about_logits,  # Silent, and wrong in every step.
    about_loss_scale,
    about_order,
    about_kept_order,
)

# Not at fit, as a strategy has refused the worst of it when it was made. They read the environment, too.
ABOUT_THE_PROCESS: tuple[Callable[[FitCall, Mapping[str, str]], Iterable[Finding]], ...] = (
    about_versions,  # First, as other findings may follow from it.
    about_thread_pool,  # The process would hang.
    about_allocator,
    about_devices_and_cores,
)


def findings_of(program: FitCall, checks: Iterable[Check]) -> list[Finding]:
    """What the checks find, in their order."""
    return [finding for check in checks for finding in check(program)]
