"""Synchronous training on a mesh: rows are sharded over one axis, variables over the others."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding

from lockstep._errors import ModelError, OptionError, check_depth, shown
from lockstep._keras.patches import value_in_context
from lockstep._keras.trainer import build_for_inputs
from lockstep._keras.variable_placement import has_layout, lay_out
from lockstep.collectives import CommunicationOptions, Ops
from lockstep.data.input_options import InputOptions
from lockstep.devices.names import listed_devices
from lockstep.devices.placement import MeshPlacement, Placement
from lockstep.devices.xla_flags import fix_order_on_gpus, is_deterministic
from lockstep.distributed.resolvers import ClusterResolver
from lockstep.doctor.base import RuntimeSettings
from lockstep.execution.executors import Executor, ModelParallelExecutor, SpmdExecutor
from lockstep.execution.model_parallel.model_shardings import (
    AUTO,
    LayoutArgument,
    LayoutRules,
    MeshArgument,
    MeshOptions,
    ModelShardings,
    parse_layout,
    parse_mesh,
)
from lockstep.execution.model_parallel.traced_inputs import inputs_of_model
from lockstep.execution.variable_layout import ModelLayout
from lockstep.execution.variable_shards import Recompute
from lockstep.strategies.multi_worker import WorkerStrategy
from lockstep.strategies.options import StrategyOptions, check_mesh_options, overridden_devices, prepare_process

# Of the model of ``self_check`` while it is made.
_reference_rules: ContextVar[LayoutRules | None] = ContextVar("lockstep_reference_rules", default=None)


class ModelParallelStrategy(WorkerStrategy):
    """Trains one model on a mesh of devices, with the results of one device.

    Counterpart of ``keras.distribution.ModelParallel``. Rows of a batch are sharded over the first axis of the mesh, and variables over
    the others, so that also the products of one layer are shared out (tensor parallelism). One replica computes the global batch: batch
    statistics are those of all rows, and noise is that of one device, whatever the mesh. Results equal those of one device up to
    rounding; the same mesh gives the same bits (on GPUs: see ``docs/determinism.md``). Source: Shoeybi et al., "Megatron-LM" (2019).

    Args:
        mesh: number of devices along each axis, such as ``{"data": 2, "model": 4}``, or a ``keras.distribution.DeviceMesh``, of which
            names and sizes are taken. Rows are sharded over the first axis.
        layout: ``"auto"``: by their shapes and their use in the forward pass, variables are sharded along the second axis of the mesh so
            that few collectives follow. Or rules: a ``keras.distribution.LayoutMap``, as KerasHub's ``get_layout_map`` returns it; a
            dictionary from regular expressions, which a whole path must match, to one entry for each axis of the variable: the name of
            an axis of the mesh, or None; the result of :meth:`layout`. Axes that are not divisible by their axis of the mesh stay whole.
        devices: names of this process's devices, such as ``"gpu:0"``; by default all local ones.
        shard: ``"variables"``: each large variable is also sharded over the first axis, and gathered where a step uses it. Source:
            Rajbhandari et al., "ZeRO" (2020), stage 3.
        recompute: which layers are computed again in the backward pass, so that their inner results need no memory until then:
            ``"blocks"``: repeated layers, and all others that have large or sharded variables; a function ``layer -> bool``; None: no layer.
        cluster_resolver: as in :class:`MultiWorkerMirroredStrategy`.
        communication_options: only ``timeout_seconds``, the limit of every wait for another worker, 60 by default.
        input_options: how batches reach the devices.
        check_every: number of training steps from one comparison of the variables that all workers have as a whole to the next, the last one
            at the end of ``fit``; 0: never.

    Raises:
        ClusterError: as in :class:`MultiWorkerMirroredStrategy`.
        DeviceError: a device is unknown or absent, or the mesh has another number of devices.
        OptionError: an argument is out of its range; a rule names an axis that the mesh lacks; ``layout="auto"`` with more than two axes.

    Example:
        >>> import keras, lockstep, numpy as np
        >>> strategy = lockstep.ModelParallelStrategy({"data": 1, "model": 2}, devices=["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     layers = [keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(64)]
        ...     model = keras.Sequential(layers)
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> history = model.fit(np.ones((5, 64)), np.ones((5, 64)), batch_size=3, verbose=0)
        >>> [row.axes for row in strategy.layout(model).variables if row.path.endswith("kernel")]
        [(None, 'model'), ('model', None)]
    """

    def __init__(
        self,
        mesh: MeshArgument,
        layout: LayoutArgument = AUTO,
        *,
        devices: Sequence[str | jax.Device] | None = None,
        shard: str | None = None,
        recompute: Recompute = None,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        input_options: InputOptions | None = None,
        check_every: int = 100,
    ) -> None:
        axes = parse_mesh(mesh)
        rules = parse_layout(layout, axes)
        if rules is None and len(axes.sizes) != 2:
            raise OptionError(
                f'layout="auto" needs a mesh of two axes, rows and variables, got {dict(axes.sizes)}. Fix: give layout= rules.'
            )
        checked = check_mesh_options(shard, recompute)

        def prepare(ops: Ops | None) -> StrategyOptions:
            if ops is not None or is_deterministic():
                raise OptionError(
                    "ModelParallelStrategy adds gradients by the collectives that XLA chooses, so communication_options has timeout_seconds "
                    "only, and lockstep.config.set_deterministic() is not supported. Fix: leave the other options out."
                )
            prepared = prepare_process(replicas=1, deterministic=False, input_options=input_options)
            fix_order_on_gpus()
            return replace(prepared, shard=checked, recompute=recompute)

        def place(found: Sequence[jax.Device], _: StrategyOptions) -> Placement:
            used = axes if overridden_devices() is None else axes.with_rows_only(len(found))
            self._options = MeshOptions(used.placement(found), used, rules, checked)
            return self._options.placement

        super().__init__(cluster_resolver, communication_options, devices, check_every, prepare, place)

    @property
    def mesh(self) -> Mapping[str, int]:
        """Number of devices along each axis of the mesh."""
        return dict(self._options.axes.sizes)

    def layout(self, model: keras.Model, x: Any = None) -> ModelLayout:
        """Return where the variables of a model lie, and why.

        Args:
            model: a compiled model of this strategy. Its optimizer makes its variables in the first call of ``fit``, or in
                ``model.optimizer.build(model.trainable_variables)``.
            x: inputs of a batch, a tree of arrays ``(rows, …)``, of a model that does not state its inputs, which builds it; not needed after
                a step.

        Returns:
            A row for each variable, with sizes in bytes and names of axes; ``str`` makes a table, and ``rules()`` rules for ``layout=``.

        Raises:
            ModelError: the model belongs to another strategy or is not compiled; its inputs are unknown; or a rule fits no variable, or
                two patterns fit the same one, unless a rule is its path itself, which comes first.
            OptionError: ``x`` is no tree of arrays.

        Example:
            >>> import keras, lockstep
            >>> strategy = lockstep.ModelParallelStrategy({"data": 2, "model": 1}, {".*/kernel": (None, "model")}, devices=["cpu:0", "cpu:1"])
            >>> with strategy.scope():
            ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, name="one")], name="net")
            ...     model.compile("sgd", "mse")
            >>> strategy.layout(model).rules()
            {'net/one/kernel': (None, 'model')}
        """
        self._check_owner(model, "layout")
        if x is not None:
            _check_arrays(x)
            with self._build_context(model):
                build_for_inputs(model, x)
        shardings = self._shardings_of(model)
        shardings.check_variables()
        if not shardings.is_resolved:
            if x is None and inputs_of_model(model) is None:
                raise ModelError(
                    f"layout: the inputs of model {model.name!r} are not known before its first step. Fix: give layout(model, x) a batch of "
                    "them."
                )
            self._resolve(model, x)
        return shardings.layout()

    def _executor_for(self, placement: Placement, model: keras.Model) -> Executor:
        if not isinstance(placement, MeshPlacement):  # one device, to compare with
            return SpmdExecutor(placement, self._ops)

        resolve, log = partial(self._resolve, model), partial(self._log_once, model)
        return ModelParallelExecutor(placement, self._shardings_of(model), resolve, self._recompute, log)

    def _shardings_of(self, model: keras.Model) -> ModelShardings:
        executor = self._executor_of(model)
        if isinstance(executor, ModelParallelExecutor):
            return executor.shardings
        return ModelShardings(model, self._options_now, partial(self._log_once, model))

    def _resolve(self, model: keras.Model, x: Any) -> None:
        """Resolve where the variables lie, and lay them there."""
        shardings = self._shardings_of(model)
        shardings.resolve(x)
        if self._sharder is None:
            return
        for variable, sharding in shardings.all():
            if has_layout(variable) or not sharding.is_fully_replicated:
                lay_out(variable, sharding, self._sharder)

    def _sharding_at_creation(self, variable: keras.Variable, shape: tuple[int, ...]) -> NamedSharding | None:
        return self._options_now.sharding_at_creation(variable, shape)

    @property
    def _options_now(self) -> MeshOptions:
        """The options for a model that is made now."""
        rules = _reference_rules.get()
        return self._options if rules is None else replace(self._options, rules=rules)

    @contextlib.contextmanager
    def _reference_scope(self) -> Iterator[None]:
        """Open the scope with rules for the reference model in place of those for the user's models; "auto" would shard none of it."""
        *_, axis = self._options.axes.sizes
        rules = {".*_convolution/kernel": (None, None, None, axis), ".*_dense/kernel": (axis, None)}
        with value_in_context(_reference_rules, LayoutRules(rules, must_match=True)), self.scope():
            yield

    def _runtime_settings(self) -> RuntimeSettings:
        return replace(super()._runtime_settings(), layout=self._known_layout)

    def _known_layout(self, model: keras.Model) -> ModelLayout | None:
        """Return the layout of a model; None if it cannot be known before the first step."""
        is_known = self._shardings_of(model).is_resolved or inputs_of_model(model) is not None
        return self.layout(model) if is_known else None

    def _layout_notes(self, model: keras.Model) -> list[str]:
        self._shardings_of(model).check_variables()
        return []  # They are logged when the layout is resolved.

    def _compared_settings(self) -> dict[str, Any]:
        rules = self._options.rules
        described = AUTO if rules is None else {pattern: list(axes) for pattern, axes in rules.axes.items()}
        return super()._compared_settings() | {"mesh": self.mesh, "layout": described}

    def _summary(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self._options.axes.sizes.items())
        return f"{type(self).__name__}: mesh {sizes} ({listed_devices(self.devices)})"


def _check_arrays(x: Any) -> None:
    check_depth("layout: x", x)
    leaves = jax.tree.leaves(x)
    if not leaves or not all(isinstance(leaf, (np.ndarray, jax.Array, jax.ShapeDtypeStruct)) for leaf in leaves):
        raise OptionError(
            f"layout: x: expected a tree of arrays (rows, …), got {shown(x)}. Fix: pass a batch of the model's inputs."
        )
