"""Arguments of the strategies: what goes together, and what each stands for."""

from lockstep._errors import OptionError
from lockstep.collectives import AutoAllReduce, CrossDeviceOps, Ops, TreeAllReduce, resolve_cross_device_ops
from lockstep.data.fit_entry import InputOptions

__all__ = ["options_of", "refuse_with_slices", "resolve_ops"]


def resolve_ops(ops: Ops | None, deterministic: bool) -> CrossDeviceOps:
    """The operation that adds gradients; refused where it has an order of its own and the bits must not depend on the devices."""
    resolved = TreeAllReduce() if deterministic and ops is None else resolve_cross_device_ops(ops)
    if deterministic and not isinstance(resolved, TreeAllReduce):
        raise OptionError(
            f"cross_device_ops={type(resolved).__name__} adds gradients in an order that depends on the devices, and "
            "deterministic=True asks for one that does not: leave cross_device_ops and communication_options out, or take "
            "lockstep.TreeAllReduce()."
        )
    return resolved


def options_of(options: InputOptions | None) -> InputOptions:
    """The options, or the default ones."""
    if options is not None and not isinstance(options, InputOptions):
        raise OptionError(f"input_options: expected a lockstep.InputOptions or None, got {options!r}.")
    return options or InputOptions()


def refuse_with_slices(ops: CrossDeviceOps, deterministic: bool) -> None:
    """Refuse what cannot go with ``shard_optimizer``."""
    if deterministic:
        raise OptionError(
            "shard_optimizer=True and deterministic=True: what a device updates would depend on the number of devices. "
            "Leave one of them out."
        )
    if type(ops) is not AutoAllReduce:
        raise OptionError(
            f"shard_optimizer=True adds gradients by the platform's reduce-scatter, not by {type(ops).__name__}. Leave "
            "cross_device_ops and communication_options out."
        )
