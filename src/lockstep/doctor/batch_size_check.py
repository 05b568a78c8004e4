"""Whether a batch is large enough for the replicas, and for what they compute from their own rows."""

from collections.abc import Iterator

import keras

from lockstep._keras.layers import layers_of, unsynchronized_normalizations
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall

__all__ = ["about_few_rows", "about_normalization"]

FEW = 8  # rows; below, the error of ResNet-50 on ImageNet rises: figure 1 of Wu & He, "Group Normalization" (2018)


def about_few_rows(program: FitCall) -> Iterator[Finding]:
    """About a batch with fewer rows than there are replicas."""
    rows, replicas = program.rows, program.setting.replicas
    if rows is not None and rows < replicas:
        yield Finding(
            "fewer-rows-than-replicas",
            f"a batch of {rows} row{'s' * (rows != 1)} leaves {replicas - rows} of {replicas} replicas idle",
            program.at_fit,
            "the batch size is that of the global batch, which the replicas share",
            f"Make it {replicas} or more",
        )


def about_normalization(program: FitCall) -> Iterator[Finding]:
    """About a BatchNormalization that computes its mean and variance from few rows."""
    rows, replicas = program.rows, program.setting.replicas
    alone = set(unsynchronized_normalizations(program.model))
    layers = [x for x in layers_of(program.model) if isinstance(x, keras.layers.BatchNormalization) and x.trainable]
    names = [layer.name for layer in layers if layer.name in alone]
    if rows is None or rows < replicas or not names or rows // replicas >= FEW:
        return
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    synchronized = "" if replicas == 1 else "Say BatchNormalization(synchronized=True) in the scope, or take "
    yield Finding(
        "normalization-of-few-rows",
        f"BatchNormalization over {rows // replicas} rows, a replica's part of a batch of {rows}",
        f"layer {names[0]!r}{others}, {program.at_fit}",
        f"with less than {FEW} rows mean and variance are so uncertain that accuracy falls (Wu & He, Group Normalization, 2018)",
        f"{synchronized or 'Take '}a larger batch, or GroupNormalization",
    )
