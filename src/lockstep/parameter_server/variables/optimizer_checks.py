"""Which optimizers mean the same where each server applies them to its own variables, or to shards; all others are refused."""

import keras

from lockstep._errors import OptionError
from lockstep.parameter_server.variables.sharding import ShardingPlan

__all__ = ["check_optimizer"]

_SEE_WHOLE_VARIABLES = (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon)


def check_optimizer(optimizer: keras.optimizers.Optimizer, plan: ShardingPlan) -> None:
    """Refuse an optimizer whose update of one number depends on numbers that another server holds.

    Args:
        optimizer: of the model.
        plan: where its variables are.

    Raises:
        OptionError: it is such a one.
    """
    cut = [name for name, shards in plan.shards.items() if len(shards) > 1]
    if cut and isinstance(optimizer, _SEE_WHOLE_VARIABLES):
        raise OptionError(
            f"{type(optimizer).__name__} needs each variable as a whole, and variable_partitioner cuts {cut[0]!r} into "
            f"{len(plan.shards[cut[0]])} shards. Leave the partitioner out, or take another optimizer."
        )
    if cut and optimizer.clipnorm is not None:
        raise OptionError(
            f"clipnorm needs the norm of each variable as a whole, and variable_partitioner cuts {cut[0]!r}. Leave the partitioner "
            f"out, or use clipvalue."
        )
    if plan.servers > 1 and optimizer.global_clipnorm is not None:
        raise OptionError(
            f"global_clipnorm needs the gradients of all variables at once, and they are on {plan.servers} servers. Use one server, "
            f"or clipnorm."
        )
    if plan.servers > 1 and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise OptionError(
            f"LossScaleOptimizer skips an update where one gradient is not finite, and {plan.servers} servers would not agree on that. "
            f"Use one server, or bfloat16, which needs no loss scale."
        )
    if (cut or plan.servers > 1) and isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise OptionError(
            "MultiOptimizer counts the steps of each of its optimizers, and a server may have no variable of one of them. Use one "
            f"server without variable_partitioner, or one optimizer; got {plan.servers} servers."
        )
