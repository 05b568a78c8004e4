"""Arguments of the strategies, the settings of the process that must precede the start of JAX, and the device override."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax

from lockstep._errors import DeviceError, OptionError, flag, shown, whole_number
from lockstep._keras import trainer
from lockstep._keras.patches import value_in_context
from lockstep.collectives import AutoAllReduce, CrossDeviceOps, Ops, TreeAllReduce, ops_from_argument
from lockstep.data.input_options import InputOptions, check_input_options
from lockstep.devices.cpu_devices import ensure_cpu_devices, has_started
from lockstep.devices.host_memory import keep_memory
from lockstep.devices.names import platform_of, resolve_devices
from lockstep.devices.placement import Placement, placement_on
from lockstep.devices.xla_flags import is_deterministic, prepare_determinism
from lockstep.execution.variable_shards import Recompute, Shard

MAX_REPLICAS = 65_536  # far above all batches; the parts of each replica are objects of this process

_device_count: ContextVar[int | None] = ContextVar("lockstep_device_override", default=None)
_is_alone = ContextVar("lockstep_alone", default=False)


@dataclass(frozen=True)
class StrategyOptions:
    """Checked arguments of a strategy, as in :class:`MirroredStrategy`."""

    cross_device_ops: CrossDeviceOps
    replicas: int | None
    deterministic: bool
    shard: Shard
    recompute: Recompute
    input_options: InputOptions


def prepare_process(
    cross_device_ops: Ops | None = None,
    replicas: int | None = None,
    deterministic: bool | None = None,
    input_options: InputOptions | None = None,
    shard: str | None = None,
    recompute: Recompute = None,
) -> StrategyOptions:
    """Check a strategy's arguments, then change the settings of the process that JAX reads when it starts.

    Call it before devices are looked up, which starts JAX: the thread pool and XLA's flags (if deterministic) and the memory
    allocator are set here. Nothing is changed if an argument is wrong. The arguments are those of :class:`MirroredStrategy`; if
    ``deterministic`` is None, :func:`lockstep.config.set_deterministic` decides.

    Raises:
        BackendError: Keras does not run on JAX, or its version is unknown.
        OptionError: an argument is out of its range, or two do not go together.
    """
    trainer.check_keras()
    deterministic = is_deterministic() if deterministic is None else flag("deterministic", deterministic)
    ops = _resolve_ops(cross_device_ops, deterministic)
    resolved_shard = _resolve_shard(shard, ops, deterministic)
    _check_recompute(recompute, resolved_shard)
    if replicas is not None:
        replicas = whole_number("replicas", replicas, maximum=MAX_REPLICAS)
    if input_options is not None:
        check_input_options("input_options", input_options)
    if deterministic:
        prepare_determinism()
    if not has_started():  # The allocator's settings do not reach threads that run already.
        keep_memory()
    if _device_count.get() is not None:
        replicas = None
    return StrategyOptions(ops, replicas, deterministic, resolved_shard, recompute, input_options or InputOptions())


def one_axis_placement(devices: Sequence[jax.Device], options: StrategyOptions) -> Placement:
    """Return the placement of data parallelism: the rows of the replicas over all devices."""
    return placement_on(devices, options.replicas or len(devices))


def _resolve_ops(ops: Ops | None, deterministic: bool) -> CrossDeviceOps:
    """Return the operation that adds gradients; a deterministic strategy needs one whose order does not depend on the devices."""
    resolved = TreeAllReduce() if deterministic and ops is None else ops_from_argument(ops)
    if deterministic and not isinstance(resolved, TreeAllReduce):
        raise OptionError(
            f"cross_device_ops={type(resolved).__name__} adds gradients in an order that depends on the devices, and deterministic=True needs "
            "an order that does not. Fix: leave cross_device_ops and communication_options out, or use lockstep.TreeAllReduce()."
        )
    return resolved


def _resolve_shard(shard: str | None, ops: CrossDeviceOps, deterministic: bool) -> Shard:
    """Return which variables are sharded."""
    if shard is not None and not (isinstance(shard, str) and shard in ("optimizer", "variables")):
        raise OptionError(
            f'shard: expected "optimizer", "variables" or None, got {shown(shard)}. Fix: pass one of these, or leave it out.'
        )
    if shard is not None and not deterministic and type(ops) is not AutoAllReduce:
        raise OptionError(
            f"shard={shard!r} adds gradients by the platform's reduce-scatter, not by {type(ops).__name__}. Fix: leave "
            "cross_device_ops and communication_options out."
        )
    return shard  # type: ignore[return-value]  # checked above


def check_mesh_options(shard: str | None, recompute: Recompute) -> Shard:
    """Check the arguments ``shard`` and ``recompute`` of a strategy with a mesh; return the former.

    Raises:
        OptionError: one is out of its range.
    """
    if shard is not None and not (isinstance(shard, str) and shard == "variables"):
        raise OptionError(
            f'shard: expected "variables" or None, got {shown(shard)}. Fix: pass shard="variables", or leave it out.'
        )
    _check_recompute(recompute, "variables")
    return shard  # type: ignore[return-value]  # checked above


def _check_recompute(recompute: Recompute, shard: Shard) -> None:
    if recompute is None:
        return
    if not callable(recompute) and not (isinstance(recompute, str) and recompute == "blocks"):
        raise OptionError(
            f'recompute: expected "blocks", a function of a layer or None, got {shown(recompute)}. Fix: pass one of these, or leave it out.'
        )
    if shard != "variables":
        raise OptionError(
            'recompute belongs to shard="variables", whose gathered variables it saves. Fix: add shard="variables", or use keras.remat.'
        )


# --- device override: the scaling report trains a script on other devices than the script names -------------------


@contextmanager
def override_devices(count: int, *, is_alone: bool = False) -> Iterator[None]:
    """Give each strategy that is made in this context the first ``count`` devices of JAX's default platform, one replica each.

    Args:
        count: number of devices; 0: strategies are made on one device, and their scopes leave models to plain Keras.
        is_alone: whether a ``MultiWorkerMirroredStrategy`` is made for this process alone, and not refused.
    """
    with value_in_context(_device_count, count), value_in_context(_is_alone, is_alone):
        yield


def is_made_alone() -> bool:
    """Whether workers are not connected, inside ``override_devices(…, is_alone=True)``."""
    return _is_alone.get()


def overridden_devices() -> Sequence[jax.Device] | None:
    """Return the devices of the surrounding :func:`override_devices`; None outside of one.

    Raises:
        DeviceError: there are fewer.
    """
    count = _device_count.get()
    if count is None:
        return None
    count = max(1, count)
    platform = platform_of(jax.local_devices()[0])
    if platform == "cpu":
        ensure_cpu_devices(count)
    found = jax.local_devices()
    if len(found) < count:
        raise DeviceError(
            f"There are {len(found)} {platform} devices here; {count} were asked for. Fix: use at most {len(found)}."
        )
    return found[:count]


def find_devices(devices: Sequence[str | jax.Device] | None) -> Sequence[jax.Device]:
    """Return the local devices of these names, or those of the surrounding :func:`override_devices`; starts JAX.

    Args:
        devices: names or JAX devices; None: all of JAX's default platform.

    Raises:
        DeviceError: a device is unknown, absent or named twice, or it is too late to make the CPU devices asked for.
    """
    return resolve_devices(overridden_devices() or devices)


def refuse_device_override(strategy: str) -> None:
    """Raise an OptionError inside :func:`override_devices`: strategies of several processes cannot be measured."""
    if _device_count.get() is not None:
        raise OptionError(
            f"{strategy}: only strategies of one process can be measured. Fix: use a MirroredStrategy for that."
        )


def scopes_disabled() -> bool:
    """Whether scopes leave models to plain Keras, inside ``override_devices(0)``."""
    return _device_count.get() == 0
