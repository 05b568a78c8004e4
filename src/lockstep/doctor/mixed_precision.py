"""Whether gradients in half precision are scaled, so that small ones do not become 0."""

from collections.abc import Iterator

import keras

from lockstep._keras.layers import layers_of
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall

__all__ = ["about_loss_scale"]


def about_loss_scale(program: FitCall) -> Iterator[Finding]:
    """About layers that compute in float16 and an optimizer that does not scale the loss."""
    optimizer = program.model.optimizer
    if optimizer is None or isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor:
        return
    half = [x.name for x in layers_of(program.model) if x.trainable_variables and x.compute_dtype == "float16"]
    if half:
        yield Finding(
            "float16-without-loss-scale",
            f"{len(half)} layer{'s compute' if len(half) > 1 else ' computes'} in float16, and {type(optimizer).__name__} does not scale the loss",
            f"layer {half[0]!r}, {program.at_compile}",
            "gradients below 6e-8 become 0, and their weights stand still (Micikevicius et al., Mixed Precision Training, 2018)",
            "Leave compile(auto_scale_loss=True) as it is with the policy for the whole model, wrap the optimizer in "
            'keras.optimizers.LossScaleOptimizer, or take "mixed_bfloat16"',
        )
