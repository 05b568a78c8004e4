"""Steps on arrays that are only described: every program that a step starts is compiled for its devices, and none is run.

`jax.experimental.topologies` describes devices that are not there. While :func:`recording` is open, arrays that are put on such
devices have a shape, a dtype and a sharding and no values, and a function of ``jax.jit`` that gets them is compiled in place of
being run. So a step of several programs, such as one with ``deterministic=True``, is seen as a whole.
"""

import contextlib
import functools
import threading
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from lockstep.execution import deterministic_replicas


class DescribedArray(jax.Array):
    """An array on described devices."""

    def __init__(self, aval, sharding):
        self._aval, self._sharding = aval, sharding

    shape = property(lambda self: self._aval.shape)
    dtype = property(lambda self: self._aval.dtype)
    weak_type = property(lambda self: self._aval.weak_type)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: int(np.prod(self.shape, dtype=int)))
    nbytes = property(lambda self: self.size * self.dtype.itemsize)
    sharding = property(lambda self: self._sharding)
    is_fully_addressable = property(lambda self: self.sharding.is_fully_addressable)

    @property
    def addressable_shards(self):
        """The parts on this process's devices."""
        part = described(jax.ShapeDtypeStruct(self.sharding.shard_shape(self.shape), self.dtype))
        own = sorted(self.sharding.device_set, key=lambda device: device.id)
        return [_Shard(device, part(SingleDeviceSharding(device))) for device in own if not device.process_index]

    def delete(self):
        """Do nothing: there is no memory."""


@dataclass(frozen=True)
class _Shard:
    device: jax.Device
    data: DescribedArray


def described(value):
    """Return a function from a sharding to a described array like ``value``, an array or its type."""
    aval = value if isinstance(value, jax.core.ShapedArray) else _real_typeof(_plain(value))
    return functools.partial(DescribedArray, aval)


@dataclass
class Program:
    """A program that a step started: its name, how often it was started, and the compiled form."""

    name: str
    compiled: jax.stages.Compiled
    runs: int = 0


_real_jit, _real_put, _real_typeof = jax.jit, jax.device_put, jax.typeof
_real_from_shards, _real_from_callback = jax.make_array_from_single_device_arrays, jax.make_array_from_callback
_real_copy = jnp.copy
_lock = threading.RLock()
_recorded: dict[int, Program] | None = None


@contextlib.contextmanager
def recording():
    """Return a list, which has the programs of the steps that are started while this context is open, when it closes."""
    global _recorded
    programs, _recorded = [], {}
    replaced = {
        "jit": _jit,
        "device_put": _put,
        "typeof": lambda value: value._aval if isinstance(value, DescribedArray) else _real_typeof(value),
        "make_array_from_single_device_arrays": _from_shards,
        "make_array_from_callback": _from_callback,
    }
    with contextlib.ExitStack() as stack:
        stack.callback(globals().__setitem__, "_recorded", None)
        stack.enter_context(mock.patch.multiple(jax, **replaced))
        stack.enter_context(mock.patch.object(jnp, "copy", _copy))
        for name in ("_pair", "_joined"):  # jitted when their module was imported
            original = getattr(deterministic_replicas, name)
            stack.enter_context(mock.patch.object(deterministic_replicas, name, _Recorder(original)))
        yield programs
        programs += _recorded.values()


class _Recorder:
    """A function of ``jax.jit`` that compiles what described arrays are given to."""

    def __init__(self, jitted):
        self._jitted, self._compiled = jitted, {}
        functools.update_wrapper(self, jitted)

    def __getattr__(self, name):
        return getattr(self._jitted, name)

    def __call__(self, *args, **kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs))
        on_devices = [leaf for leaf in leaves if isinstance(leaf, DescribedArray)]
        if _recorded is None or not on_devices:
            return self._jitted(*args, **kwargs)
        plain = [_plain(leaf) for leaf in leaves]
        key = structure, *map(_kind, plain)
        with _lock:  # Threads compile one program for all devices.
            if key not in self._compiled:
                args, kwargs = jax.tree.unflatten(structure, plain)
                lowered = self._jitted.lower(*args, **kwargs)
                program = Program(getattr(self._jitted, "__name__", "program"), lowered.compile())
                self._compiled[key] = program, lowered.out_info
            program, results = self._compiled[key]
            _recorded.setdefault(id(program), program).runs += 1
        shardings = program.compiled.output_shardings
        if isinstance(on_devices[0].sharding, SingleDeviceSharding):
            shardings = jax.tree.map(lambda _: on_devices[0].sharding, results)
        return jax.tree.map(lambda result, sharding: described(result)(sharding), results, shardings)


def _jit(function=None, **options):
    if function is None:
        return functools.partial(_jit, **options)
    return _Recorder(_real_jit(function, **options))


def _put(tree, target=None, **options):
    targets = jax.tree.broadcast(target, tree, is_leaf=lambda leaf: leaf is None)
    shardings = [
        SingleDeviceSharding(one) if isinstance(one, jax.Device) else one
        for one in jax.tree.leaves(targets, is_leaf=lambda leaf: leaf is None)
    ]
    if not any(one is not None and _is_described(one) for one in shardings):
        return _real_put(tree, target, **options)
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([described(leaf)(one) for leaf, one in zip(leaves, shardings, strict=True)])


def _from_shards(shape, sharding, arrays, **options):
    if not _is_described(sharding):
        return _real_from_shards(shape, sharding, arrays, **options)
    return described(jax.ShapeDtypeStruct(shape, arrays[0].dtype))(sharding)


def _from_callback(shape, sharding, callback, **options):
    if not _is_described(sharding):
        return _real_from_callback(shape, sharding, callback, **options)
    part = callback(next(iter(sharding.addressable_devices_indices_map(shape).values())))
    return described(jax.ShapeDtypeStruct(shape, part.dtype))(sharding)


def _copy(array, **options):
    return array if isinstance(array, DescribedArray) else _real_copy(array, **options)


def _is_described(sharding):
    device = next(iter(sharding.device_set))
    return device.platform != "cpu"


def _plain(leaf):
    if not isinstance(leaf, DescribedArray):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)


def _kind(leaf):
    """What a program is compiled for: not the device, if it is one."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return str(_real_typeof(leaf))
    one = isinstance(leaf.sharding, SingleDeviceSharding)
    return leaf.shape, leaf.dtype, leaf.weak_type, None if one else leaf.sharding
