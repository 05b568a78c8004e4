"""Whether a loss takes what the last layer gives: probabilities or logits."""

from collections.abc import Iterator

from lockstep.doctor.classification_outputs import ClassificationOutput, heads_of
from lockstep.doctor.finding import Finding
from lockstep.doctor.fit_call import FitCall

__all__ = ["about_logits"]


def about_logits(program: FitCall) -> Iterator[Finding]:
    """About probabilities that are taken for logits, logits that are taken for probabilities, and a softmax of one number.

    Keras's TensorFlow backend repairs the first by looking behind the activation; on JAX nothing does.
    """
    for head in heads_of(program):
        where = f"{head.where}, {program.at_compile}"
        ending = head.output.activation
        if ending == "softmax" and head.output.shape and head.output.shape[-1] == 1:
            yield _softmax_of_one(where)
        elif ending in ("softmax", "sigmoid") and head.loss.from_logits:
            yield _activated_twice(head, ending, where)
        elif ending == "linear" and not head.loss.from_logits:
            yield _never_activated(head, where)


def _softmax_of_one(where: str) -> Finding:
    return Finding(
        "softmax-of-one",
        "a softmax over one number",
        where,
        "it is always 1, whatever the weights are, and their gradient is always 0",
        'Take activation="sigmoid" with a binary cross-entropy, or a unit for each class',
    )


def _activated_twice(head: ClassificationOutput, ending: str, where: str) -> Finding:
    return Finding(
        "softmax-from-logits",
        f"the output is a {ending}, and {head.loss.shown} takes it for logits",
        where,
        f"the loss then sees a {ending} of a {ending}: it cannot come near 0, and gradients are small, so that training is slow or stands",
        "Say from_logits=False, or leave out the activation",
    )


def _never_activated(head: ClassificationOutput, where: str) -> Finding:
    activation = "sigmoid" if head.loss.kind == "binary" else "softmax"
    return Finding(
        "logits-as-probabilities",
        f"the output is linear, and {head.loss.shown} takes it for probabilities",
        where,
        "it is cut to 0 … 1 before the logarithm: where it lies outside, which any weights may give, there is no gradient",
        f'Say from_logits=True, or give the layer activation="{activation}"',
    )
