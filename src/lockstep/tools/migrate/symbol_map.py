"""Which name of TensorFlow is which of Keras and Lockstep, and which is none: the tables that the translation and the page show."""

import re

from lockstep.tools.migrate.tensorflow1 import TENSORFLOW_1

__all__ = ["ABSENT", "RENAMED", "STRATEGY_METHODS", "translated", "why_absent"]

# The longest entry that a dotted name begins with says what it becomes.
RENAMED = {
    "tensorflow.keras": "keras",
    "keras.callbacks.BackupAndRestore": "lockstep.callbacks.BackupAndRestore",
    "keras.callbacks.experimental.BackupAndRestore": "lockstep.callbacks.BackupAndRestore",
    "keras.callbacks.TensorBoard": "lockstep.callbacks.TensorBoard",
    "keras.layers.experimental.preprocessing": "keras.layers",
    "keras.mixed_precision.experimental.set_policy": "keras.mixed_precision.set_global_policy",
    "keras.optimizers.experimental": "keras.optimizers",
    "keras.optimizers.legacy": "keras.optimizers",
    "tensorflow.config.experimental.enable_op_determinism": "lockstep.config.set_deterministic",
    "tensorflow.distribute": "lockstep",
    "tensorflow.distribute.DistributedValues": "lockstep.PerReplica",
    "tensorflow.distribute.coordinator": "lockstep",
    "tensorflow.distribute.coordinator.PerWorkerValue": "lockstep.PerWorkerValues",
    "tensorflow.distribute.experimental.coordinator": "lockstep",
    "tensorflow.nn.compute_average_loss": "lockstep.compute_average_loss",
    "tensorflow.nn.scale_regularization_loss": "lockstep.scale_regularization_loss",
    "tensorflow.random.set_seed": "keras.utils.set_random_seed",
    "tensorflow.set_random_seed": "keras.utils.set_random_seed",
    "tensorflow.compat.v1.set_random_seed": "keras.utils.set_random_seed",
    "tensorflow.train.ClusterSpec": "lockstep.cluster_resolver.ClusterSpec",
}

# What stays as it is, with the reason and what to write. The longest entry counts, and the one above where both are as long.
ABSENT = {
    **TENSORFLOW_1,
    "keras.layers.experimental.SyncBatchNormalization": "write keras.layers.BatchNormalization(synchronized=True)",
    "keras.losses.Reduction": 'write a word, as in reduction="sum"; without one it is the mean over the batch',
    "keras.utils.multi_gpu_model": "write lockstep.MirroredStrategy(), and build and compile the model in its scope",
    "keras.utils.experimental.DatasetCreator": "give fit what the function returns, without repeat() or with steps_per_epoch (docs/parameter_servers.md)",
    "tensorflow.GradientTape": "there are no tapes on JAX; write the step with jax.value_and_grad (docs/custom_loops.md)",
    "tensorflow.Variable": "the variables of a model are Keras's; make others by keras.Variable",
    "tensorflow.compat": "TensorFlow 1 has no counterpart; examples/cifar10_towers shows such a loop",
    **dict.fromkeys(
        (
            "tensorflow.config.experimental.list_logical_devices",
            "tensorflow.config.experimental.list_physical_devices",
            "tensorflow.config.list_logical_devices",
            "tensorflow.config.list_physical_devices",
        ),
        "write jax.local_devices(), below the line that makes the strategy",
    ),
    "tensorflow.config": "JAX starts its devices by itself; name them to the strategy, as in lockstep.MirroredStrategy(['gpu:0', 'gpu:1'])",
    "tensorflow.contrib": "TensorFlow 1 has no counterpart; see the pages of docs/",
    "tensorflow.data.experimental.AutoShardPolicy": "all workers read the same, and each takes its rows: leave it out",
    "tensorflow.device": "a strategy places its models; name the devices to it, or use keras.device outside of one",
    "tensorflow.distribute.OneDeviceStrategy": "write lockstep.MirroredStrategy([device])",
    "tensorflow.distribute.Server": "every process runs the same script, servers too (docs/parameter_servers.md): leave it out with its join()",
    "tensorflow.distribute.Strategy": "each strategy has scope, run, reduce and gather; as a type, name one, such as lockstep.MirroredStrategy",
    "tensorflow.distribute.StrategyExtended": "strategy.reduce, gather and run do what it does in custom loops (docs/custom_loops.md)",
    "tensorflow.distribute.TPUStrategy": "JAX has TPUs as devices: lockstep.MirroredStrategy() takes all that are there",
    "tensorflow.distribute.cluster_resolver.GCEClusterResolver": "write lockstep.cluster_resolver.SimpleClusterResolver, or set TF_CONFIG",
    "tensorflow.distribute.cluster_resolver.TPUClusterResolver": "JAX finds its TPUs by itself",
    "tensorflow.distribute.cluster_resolver.UnionResolver": "write lockstep.cluster_resolver.SimpleClusterResolver",
    "tensorflow.distribute.coordinator.experimental_get_current_worker_index": "strategy.cluster_resolver.task_id is it on a worker",
    "tensorflow.distribute.experimental.CollectiveHints": "write lockstep.CommunicationOptions",
    "tensorflow.distribute.experimental.PreemptionCheckpointHandler": "lockstep.callbacks.BackupAndRestore in fit and strategy.checkpoint "
    "in a loop also save at SIGTERM (docs/resume.md)",
    "tensorflow.distribute.experimental.PreemptionWatcher": "lockstep.callbacks.BackupAndRestore stops at SIGTERM (docs/resume.md)",
    "tensorflow.distribute.experimental.TPUStrategy": "JAX has TPUs as devices: lockstep.MirroredStrategy() takes all that are there",
    "tensorflow.distribute.experimental.TerminationConfig": "lockstep.callbacks.BackupAndRestore stops at SIGTERM (docs/resume.md)",
    "tensorflow.distribute.experimental.rpc": "lockstep.ClusterCoordinator schedules functions on workers (docs/coordinator.md)",
    "tensorflow.distribute.experimental_set_strategy": "enter strategy.scope(), as a with statement",
    "tensorflow.distribute.RunOptions": "there is nothing to choose: leave it out",
    "tensorflow.estimator": "estimators have no counterpart: write a Keras model",
    "tensorflow.function": "a step is compiled by itself: leave it out, or use jax.jit in a loop of your own (docs/custom_loops.md)",
    "tensorflow.python": "TensorFlow's private modules have no counterpart",
    "tensorflow.saved_model": "write model.save('model.keras'), or model.export for a server",
    "tensorflow.summary": "lockstep.callbacks.TensorBoard writes what fit logs",
    "tensorflow.train": "lockstep.callbacks.BackupAndRestore in fit, strategy.checkpoint in a loop (docs/resume.md)",
}

# TensorFlow 2 has Keras's classes in these modules too; what begins with a small letter there is TensorFlow 1's.
_ALIASES = re.compile(r"tensorflow\.(initializers|losses|metrics|optimizers)\.(?=[A-Z])")

# Methods of a strategy that older scripts call by other names, or that are gone.
STRATEGY_METHODS = {
    "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
    "experimental_run_v2": "run",
}


def _prefix(name: str, table: dict[str, str]) -> str:
    """The longest entry that a dotted name is or begins with; empty where there is none."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in table), "")


def translated(name: str) -> str:
    """What a full dotted name becomes; itself where that is not known.

    Example:
        >>> translated("tensorflow.keras.layers.Dense"), translated("tensorflow.distribute.MirroredStrategy")
        ('keras.layers.Dense', 'lockstep.MirroredStrategy')
    """
    name = _ALIASES.sub(r"keras.\1.", name)
    while (prefix := _prefix(name, RENAMED)) and len(_prefix(name, ABSENT)) < len(prefix):
        name = RENAMED[prefix] + name[len(prefix) :]
    return name


def why_absent(name: str) -> str | None:
    """What to write in place of a name that is not translated; None where it may stay.

    Example:
        >>> why_absent("tensorflow.distribute.OneDeviceStrategy")
        'write lockstep.MirroredStrategy([device])'
        >>> why_absent("tensorflow.data.Dataset")
    """
    of_version_1 = name.replace("tensorflow.compat.v1.", "tensorflow.", 1)
    prefix = _prefix(of_version_1, ABSENT) or _prefix(name, ABSENT)
    return (prefix and ABSENT[prefix]) or None
