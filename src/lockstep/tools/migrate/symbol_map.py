"""Tables of names: the replacement of each name of TensorFlow, and advice for names without a counterpart."""

import re

_OPTIMIZERS = {
    "AdadeltaOptimizer": "Adadelta",
    "AdagradDAOptimizer": "Adagrad",
    "AdagradOptimizer": "Adagrad",
    "AdamOptimizer": "Adam",
    "FtrlOptimizer": "Ftrl",
    "GradientDescentOptimizer": "SGD",
    "Optimizer": "Optimizer",
    "ProximalAdagradOptimizer": "Adagrad",
    "ProximalGradientDescentOptimizer": "SGD",
    "RMSPropOptimizer": "RMSprop",
}
_DECAYS = {
    "cosine_decay": "CosineDecay",
    "cosine_decay_restarts": "CosineDecayRestarts",
    "exponential_decay": "ExponentialDecay",
    "inverse_time_decay": "InverseTimeDecay",
    "linear_cosine_decay": "CosineDecay",
    "natural_exp_decay": "ExponentialDecay",
    "noisy_linear_cosine_decay": "CosineDecay",
    "piecewise_constant": "PiecewiseConstantDecay",
    "piecewise_constant_decay": "PiecewiseConstantDecay",
    "polynomial_decay": "PolynomialDecay",
}
_INITIALIZERS = {
    "constant_initializer": "Constant",
    "glorot_normal_initializer": "GlorotNormal",
    "glorot_uniform_initializer": "GlorotUniform",
    "ones_initializer": "Ones",
    "orthogonal_initializer": "Orthogonal",
    "random_normal_initializer": "RandomNormal",
    "random_uniform_initializer": "RandomUniform",
    "truncated_normal_initializer": "TruncatedNormal",
    "uniform_unit_scaling_initializer": "VarianceScaling",
    "variance_scaling_initializer": "VarianceScaling",
    "zeros_initializer": "Zeros",
}

_SCHEDULE = "write keras.optimizers.schedules.{} and give it to the optimizer as learning_rate; it counts the steps"
_OPTIMIZER = "write keras.optimizers.{} and give it to compile; fit minimizes"
_INITIALIZER = "write keras.initializers.{} and give it to the layer"
_QUEUE = (
    "there are no queues: write a tf.data.Dataset, or a keras.utils.PyDataset, and give it to fit, which prefetches"
)
_THREADS = "there are no threads to start or to join, as fit prefetches: leave it out"
_BATCHES = "write tf.data.Dataset.batch, or arrays and fit(batch_size=…)"
_SHUFFLED = "write tf.data.Dataset.shuffle(…).batch(…), or arrays and fit(batch_size=…, shuffle=True)"
_FILES = "write tf.data.TFRecordDataset, TextLineDataset or FixedLengthRecordDataset over the names of the files"
_SESSION = "there are no sessions: fit trains, and lockstep.callbacks.BackupAndRestore resumes (docs/resume.md)"
_CONFIGURED = "JAX sets its threads and its memory: leave it out"
_HOOK = "write a keras.callbacks.Callback and give it to fit"
_STEP = "write model.optimizer.iterations"
_SAVED = "lockstep.callbacks.BackupAndRestore in fit, strategy.checkpoint in a loop (docs/resume.md)"
_OLD_FILES = "read the old file with TensorFlow in a separate program, and give the arrays to layer.set_weights"
_VARIABLE = "write self.add_weight in a keras.layers.Layer, or keras.Variable outside of one"
_VARIABLES = "write model.trainable_variables, model.non_trainable_variables or model.variables"
_COLLECTION = "there are no collections: model.losses, model.metrics and model.variables have what layers add"
_INITIALIZED = "variables are initialized when they are created: leave it out"
_ASSIGNED = "write variable.assign in a layer's call, with keras.ops.scatter_update for some rows"
_SCOPE = "give the layer a name, or use keras.name_scope"
_GRAPH = "there is no graph to build: write a keras.Model"
_PLACEHOLDER = "write keras.Input, or give the arrays to fit"
_GRADIENTS = "write jax.value_and_grad in a custom training loop (docs/custom_loops.md); fit computes them"
_ADDED = "layers add losses by self.add_loss, and model.losses has them; fit adds them up"
_CALLED_BACK = "write keras.ops, or jax.pure_callback for what only Python can do"

_TRAINING = {
    **{name: _OPTIMIZER.format(keras) for name, keras in _OPTIMIZERS.items()},
    **{name: _SCHEDULE.format(keras) for name, keras in _DECAYS.items()},
    "MomentumOptimizer": _OPTIMIZER.format("SGD(momentum=…)"),
    "SyncReplicasOptimizer": "replicas are synchronized: write keras.optimizers and lockstep.MultiWorkerMirroredStrategy",
    "ExponentialMovingAverage": "write use_ema=True in the optimizer",
    **dict.fromkeys(("QueueRunner", "queue_runner", "add_queue_runner", "start_queue_runners"), _THREADS),
    **dict.fromkeys(("Coordinator", "LooperThread"), _THREADS),
    **dict.fromkeys(("batch", "batch_join", "maybe_batch", "maybe_batch_join"), _BATCHES),
    **dict.fromkeys(
        ("shuffle_batch", "shuffle_batch_join", "maybe_shuffle_batch", "maybe_shuffle_batch_join"), _SHUFFLED
    ),
    **dict.fromkeys(("string_input_producer", "match_filenames_once"), _FILES),
    **dict.fromkeys(("input_producer", "slice_input_producer", "range_input_producer", "limit_epochs"), _QUEUE),
    **dict.fromkeys(
        (
            "ChiefSessionCreator",
            "MonitoredSession",
            "MonitoredTrainingSession",
            "Scaffold",
            "SessionCreator",
            "SessionManager",
            "SingularMonitoredSession",
            "Supervisor",
            "WorkerSessionCreator",
            "basic_train_loop",
        ),
        _SESSION,
    ),
    **dict.fromkeys(
        (
            "FeedFnHook",
            "FinalOpsHook",
            "GlobalStepWaiterHook",
            "SecondOrStepTimer",
            "SessionRunArgs",
            "SessionRunContext",
            "SessionRunHook",
            "SessionRunValues",
        ),
        _HOOK,
    ),
    **dict.fromkeys(("CheckpointSaverHook", "CheckpointSaverListener"), _SAVED),
    **dict.fromkeys(("LoggingTensorHook", "StepCounterHook"), "fit logs: leave it out"),
    "StopAtStepHook": "write fit(epochs=…, steps_per_epoch=…)",
    **dict.fromkeys(("ProfilerHook", "SummarySaverHook"), "write lockstep.callbacks.TensorBoard"),
    **dict.fromkeys(
        ("NanLossDuringTrainingError", "NanTensorHook"), "write lockstep.callbacks.NanGuard (docs/nan_guard.md)"
    ),
    **dict.fromkeys(
        (
            "assert_global_step",
            "create_global_step",
            "get_global_step",
            "get_or_create_global_step",
            "global_step",
        ),
        _STEP,
    ),
    **dict.fromkeys(
        (
            "NewCheckpointReader",
            "VocabInfo",
            "checkpoint_exists",
            "get_checkpoint_mtimes",
            "import_meta_graph",
            "init_from_checkpoint",
            "list_variables",
            "load_checkpoint",
            "load_variable",
            "warm_start",
        ),
        _OLD_FILES,
    ),
    **dict.fromkeys(
        ("export_meta_graph", "write_graph"), "write model.save('model.keras'), or model.export for a server"
    ),
    "replica_device_setter": "a strategy places its models: lockstep.ParameterServerStrategy where variables belong on servers "
    "(docs/parameter_servers.md)",
    "summary_iterator": "TensorBoard reads files of events: leave it out, or read them in a separate program",
    "sdca_optimizer": _OPTIMIZER.format("SGD"),
    "do_quantize_training_on_graphdef": "write model.quantize('int8')",
    "Server": "every process runs the same script, servers too (docs/parameter_servers.md): leave it out with its join()",
    # The description of TFRecord rows stays, as tf.data still reads them.
    **dict.fromkeys(
        (
            "BytesList",
            "Example",
            "Feature",
            "FeatureList",
            "FeatureLists",
            "Features",
            "FloatList",
            "Int64List",
            "SequenceExample",
        ),
        "",
    ),
}

_OTHERS = {
    **{name: _INITIALIZER.format(keras) for name, keras in _INITIALIZERS.items()},
    **dict.fromkeys(
        ("FIFOQueue", "PaddingFIFOQueue", "PriorityQueue", "QueueBase", "RandomShuffleQueue", "queue"), _QUEUE
    ),
    **dict.fromkeys(
        (
            "FixedLengthRecordReader",
            "IdentityReader",
            "LMDBReader",
            "ReaderBase",
            "TFRecordReader",
            "TextLineReader",
            "WholeFileReader",
        ),
        _FILES,
    ),
    **dict.fromkeys(("get_variable", "get_local_variable"), _VARIABLE),
    **dict.fromkeys(("VariableScope", "get_variable_scope", "variable_op_scope", "variable_scope"), _SCOPE),
    **dict.fromkeys(
        (
            "all_variables",
            "global_variables",
            "local_variables",
            "model_variables",
            "moving_average_variables",
            "trainable_variables",
        ),
        _VARIABLES,
    ),
    **dict.fromkeys(
        ("GraphKeys", "add_to_collection", "add_to_collections", "get_collection", "get_collection_ref"), _COLLECTION
    ),
    **dict.fromkeys(
        (
            "assert_variables_initialized",
            "global_variables_initializer",
            "initialize_all_tables",
            "initialize_all_variables",
            "initialize_local_variables",
            "initialize_variables",
            "is_variable_initialized",
            "local_variables_initializer",
            "report_uninitialized_variables",
            "tables_initializer",
            "variables_initializer",
        ),
        _INITIALIZED,
    ),
    **dict.fromkeys(("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update"), _ASSIGNED),
    "count_up_to": "count in Python, or by model.optimizer.iterations",
    **dict.fromkeys(("py_func", "py_function", "numpy_function"), _CALLED_BACK),
    **dict.fromkeys(
        ("nn.dynamic_rnn", "nn.static_rnn", "nn.bidirectional_dynamic_rnn", "nn.rnn_cell"),
        "write keras.layers.RNN, LSTM or GRU",
    ),
    **dict.fromkeys(
        ("data.make_one_shot_iterator", "data.make_initializable_iterator"),
        "write for batch in dataset, or give it to fit",
    ),
    "make_template": "write a keras.layers.Layer, which keeps its variables",
    **dict.fromkeys(
        (
            "losses.add_loss",
            "losses.get_losses",
            "losses.get_regularization_loss",
            "losses.get_regularization_losses",
            "losses.get_total_loss",
        ),
        _ADDED,
    ),
    **dict.fromkeys(("VariableAggregation", "VariableSynchronization"), "write the word, as in aggregation='mean'"),
    "create_partitioned_variables": "write a partitioner of lockstep.partitioners (docs/parameter_servers.md)",
    "fixed_size_partitioner": "write lockstep.partitioners.FixedShardsPartitioner (docs/parameter_servers.md)",
    "min_max_variable_partitioner": "write lockstep.partitioners.MinSizePartitioner (docs/parameter_servers.md)",
    "variable_axis_size_partitioner": "write lockstep.partitioners.MaxSizePartitioner (docs/parameter_servers.md)",
    **dict.fromkeys(("Graph", "Operation", "get_default_graph", "reset_default_graph", "graph_util"), _GRAPH),
    **dict.fromkeys(("ConfigProto", "GPUOptions", "GraphOptions", "OptimizerOptions"), _CONFIGURED),
    **dict.fromkeys(("InteractiveSession", "Session"), _SESSION),
    **dict.fromkeys(("get_default_session", "get_session_handle", "get_session_tensor"), _SESSION),
    **dict.fromkeys(("placeholder", "placeholder_with_default", "sparse_placeholder"), _PLACEHOLDER),
    **dict.fromkeys(("gradients", "hessians", "AggregationMethod"), _GRADIENTS),
    "control_dependencies": "a step runs in the order of its values: leave it out",
    "layers": "write the layer of keras.layers, and call it",
    "losses": "write the loss of keras.losses and give it to compile",
    "metrics": "write the metric of keras.metrics and give it to compile",
    "app": "write if __name__ == '__main__': main()",
    "flags": "write argparse",
    "enable_eager_execution": "Keras 3 needs no such call: leave it out",
    "disable_eager_execution": "Keras compiles each step: leave it out",
    "enable_v2_behavior": "leave it out",
    "disable_v2_behavior": "leave it out",
}

# Keys are names of TensorFlow 1, which TensorFlow 2 has under tensorflow.compat.v1. An empty text: the name may stay.
TENSORFLOW_1 = {
    **{f"tensorflow.train.{name}": advice for name, advice in _TRAINING.items()},
    **{f"tensorflow.{name}": advice for name, advice in _OTHERS.items()},
}


_WITHOUT_STRATEGY = {
    "tensorflow.keras": "keras",
    "tf_keras": "keras",
    "keras.callbacks.experimental.BackupAndRestore": "keras.callbacks.BackupAndRestore",
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

# The longest entry that is a prefix of a dotted name determines its replacement.
RENAMED = {
    **_WITHOUT_STRATEGY,
    "keras.callbacks.BackupAndRestore": "lockstep.callbacks.BackupAndRestore",
    "keras.callbacks.TensorBoard": "lockstep.callbacks.TensorBoard",
}

# Names that are not translated, with what to write instead. The longest prefix counts; RENAMED wins if both are as long.
ABSENT = {
    **TENSORFLOW_1,
    "keras.layers.experimental.SyncBatchNormalization": "write keras.layers.BatchNormalization(synchronized=True)",
    "keras.losses.Reduction": 'write a word, as in reduction="sum"; without one it is the mean over the batch',
    "keras.utils.multi_gpu_model": "write lockstep.MirroredStrategy(), and build and compile the model in its scope",
    "keras.utils.experimental.DatasetCreator": "give fit what the function returns, without repeat() or with steps_per_epoch (docs/parameter_servers.md)",
    "tensorflow.GradientTape": "there are no tapes on JAX; write the step with jax.value_and_grad (docs/custom_loops.md)",
    "tensorflow.Variable": "the variables of a model are Keras's; create others by keras.Variable",
    "tensorflow.compat": "TensorFlow 1 has no counterpart; examples/cifar10_towers shows such a loop",
    **dict.fromkeys(
        (
            "tensorflow.config.experimental.list_logical_devices",
            "tensorflow.config.experimental.list_physical_devices",
            "tensorflow.config.list_logical_devices",
            "tensorflow.config.list_physical_devices",
            "tensorflow.test.gpu_device_name",
            "tensorflow.test.is_built_with_cuda",
            "tensorflow.test.is_built_with_gpu_support",
            "tensorflow.test.is_built_with_rocm",
            "tensorflow.test.is_gpu_available",
        ),
        "write jax.local_devices(), below the line that creates the strategy",
    ),
    **dict.fromkeys(
        (
            "tensorflow.config.experimental.set_virtual_device_configuration",
            "tensorflow.config.set_logical_device_configuration",
        ),
        "write lockstep.MirroredStrategy(['gpu:1'], replicas=2) for two replicas on a GPU, "
        "lockstep.config.set_logical_cpu_devices(2) for two CPUs",
    ),
    **dict.fromkeys(
        ("tensorflow.config.experimental.set_visible_devices", "tensorflow.config.set_visible_devices"),
        "it does not hold for JAX: name the devices to the strategy, as in lockstep.MirroredStrategy(['gpu:0']), "
        "or set JAX_PLATFORMS=cpu or CUDA_VISIBLE_DEVICES before the start",
    ),
    "tensorflow.config": "JAX initializes its devices; name them to the strategy, as in lockstep.MirroredStrategy(['gpu:0', 'gpu:1'])",
    "tensorflow.config.run_functions_eagerly": "write run_eagerly=True in compile",
    "tensorflow.config.threading": _CONFIGURED,
    "tensorflow.contrib": "TensorFlow 1 has no counterpart; see the pages of docs/",
    "tensorflow.data.experimental.AutoShardPolicy": "all workers read the same data, and each takes its rows: leave it out",
    **dict.fromkeys(
        ("tensorflow.debugging.disable_check_numerics", "tensorflow.debugging.enable_check_numerics"),
        "it does not hold for JAX: write lockstep.callbacks.NanGuard (docs/nan_guard.md)",
    ),
    "tensorflow.debugging.set_log_device_placement": "JAX places what a model computes: leave it out",
    "tensorflow.device": "a strategy places its models; name the devices to it, or use keras.device outside of one",
    "tensorflow.distribute.OneDeviceStrategy": "write lockstep.MirroredStrategy([device])",
    "tensorflow.distribute.Server": "every process runs the same script, servers too (docs/parameter_servers.md): leave it out with its join()",
    "tensorflow.distribute.Strategy": "each strategy has scope, run, reduce and gather; as a type, name one, such as lockstep.MirroredStrategy",
    "tensorflow.distribute.StrategyExtended": "strategy.reduce, gather and run do what it does in custom loops (docs/custom_loops.md)",
    "tensorflow.distribute.TPUStrategy": "JAX has TPUs as devices: lockstep.MirroredStrategy() uses all of them",
    "tensorflow.distribute.cluster_resolver.GCEClusterResolver": "write lockstep.cluster_resolver.SimpleClusterResolver, or set TF_CONFIG",
    "tensorflow.distribute.cluster_resolver.TPUClusterResolver": "JAX finds its TPUs: leave it out",
    "tensorflow.distribute.cluster_resolver.UnionResolver": "write lockstep.cluster_resolver.SimpleClusterResolver",
    "tensorflow.distribute.coordinator.experimental_get_current_worker_index": "write strategy.cluster_resolver.task_id on a worker",
    "tensorflow.distribute.experimental.CollectiveHints": "write lockstep.CommunicationOptions",
    "tensorflow.distribute.experimental.PreemptionCheckpointHandler": "lockstep.callbacks.BackupAndRestore in fit and strategy.checkpoint "
    "in a loop also save at SIGTERM (docs/resume.md)",
    "tensorflow.distribute.experimental.PreemptionWatcher": "lockstep.callbacks.BackupAndRestore stops at SIGTERM (docs/resume.md)",
    "tensorflow.distribute.experimental.TPUStrategy": "JAX has TPUs as devices: lockstep.MirroredStrategy() uses all of them",
    "tensorflow.distribute.experimental.TerminationConfig": "lockstep.callbacks.BackupAndRestore stops at SIGTERM (docs/resume.md)",
    "tensorflow.distribute.experimental.rpc": "lockstep.ClusterCoordinator schedules functions on workers (docs/coordinator.md)",
    "tensorflow.distribute.experimental_set_strategy": "enter strategy.scope(), as a with statement",
    "tensorflow.distribute.RunOptions": "there are no such options: leave it out",
    "tensorflow.estimator": "estimators have no counterpart: write a Keras model",
    "tensorflow.function": "steps are compiled: leave it out, or use jax.jit in a custom training loop (docs/custom_loops.md)",
    "tensorflow.profiler": "it does not see JAX: write lockstep.callbacks.TensorBoard, or jax.profiler.trace",
    "tensorflow.python": "TensorFlow's private modules have no counterpart",
    "tensorflow.saved_model": "write model.save('model.keras'), or model.export for a server",
    "tensorflow.summary": "lockstep.callbacks.TensorBoard writes what fit logs",
    "tensorflow.tpu": "JAX finds its TPUs: leave it out",
    "tensorflow.train": "lockstep.callbacks.BackupAndRestore in fit, strategy.checkpoint in a loop (docs/resume.md)",
}

# TensorFlow 2 has Keras's classes in these modules too; lower-case names there belong to TensorFlow 1.
_ALIASES = re.compile(r"tensorflow\.(initializers|losses|metrics|optimizers)\.(?=[A-Z]|schedules\.)")

# Old names of methods of a strategy.
STRATEGY_METHODS = {
    "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
    "experimental_run_v2": "run",
}


def _prefix(name: str, table: dict[str, str]) -> str:
    """Return the longest entry that is a prefix of a dotted name; empty if there is none."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in table), "")


def of_version_2(name: str) -> str:
    """Return a full name without ``compat.v2``, which has the names of TensorFlow itself."""
    return name.replace("tensorflow.compat.v2", "tensorflow", 1)


def translated(name: str, *, with_strategy: bool = True) -> str:
    """Translate a full dotted name; unknown names are returned unchanged.

    Args:
        name: the name.
        with_strategy: whether the program has a strategy; Lockstep's callbacks need one.

    Example:
        >>> translated("tensorflow.keras.layers.Dense"), translated("tensorflow.distribute.MirroredStrategy")
        ('keras.layers.Dense', 'lockstep.MirroredStrategy')
    """
    name = _ALIASES.sub(r"keras.\1.", of_version_2(name))
    table = RENAMED if with_strategy else _WITHOUT_STRATEGY
    while (prefix := _prefix(name, table)) and len(_prefix(name, ABSENT)) < len(prefix):
        name = table[prefix] + name[len(prefix) :]
    return name


def short(name: str) -> str:
    """Return a full name as programs write it: with ``tf`` for ``tensorflow``."""
    return name.replace("tensorflow", "tf", 1)


def why_absent(name: str) -> str | None:
    """Return what to write instead of a name that is not translated; None if it may stay.

    Example:
        >>> why_absent("tensorflow.distribute.OneDeviceStrategy")
        'write lockstep.MirroredStrategy([device])'
        >>> why_absent("tensorflow.data.Dataset")
    """
    name = of_version_2(name)
    of_version_1 = name.replace("tensorflow.compat.v1.", "tensorflow.", 1)
    prefix = _prefix(of_version_1, ABSENT) or _prefix(name, ABSENT)
    return (prefix and ABSENT[prefix]) or None


# Functions of tf.nn that Keras knows by name as activations.
ACTIVATIONS = (
    *("elu", "gelu", "leaky_relu", "relu", "relu6", "selu"),
    *("sigmoid", "silu", "softmax", "softplus", "swish", "tanh"),
)
