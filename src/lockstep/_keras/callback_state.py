"""What the callbacks of Keras change in training, so that a checkpoint has it.

Undocumented parts, as of Keras 3.15: these attributes; that ``min_delta`` gets the sign that fits the function ``monitor_op``; the method
``_flush_futures``, which waits for callbacks that run in threads.
"""

import keras
from keras.callbacks import EarlyStopping, ModelCheckpoint, OrbaxCheckpoint, ReduceLROnPlateau

_MONITORS = (EarlyStopping, ModelCheckpoint, OrbaxCheckpoint, ReduceLROnPlateau)
_SAVING = {"_batches_seen_since_last_saving": "count", "_last_batch_seen": "count", "_current_epoch": "count"}
_MONITORING = {"best": "number", "monitor_op": "function"}
# What the callbacks of Keras change in training, and of which kind it is; all else is for their constructors to say.
CALLBACK_STATE: dict[str, dict[str, str]] = {
    "BackupAndRestore": _SAVING,
    "CSVLogger": {"append_header": "flag", "keys": "texts"},
    "EarlyStopping": _MONITORING
    | {"wait": "count", "stopped_epoch": "count", "best_epoch": "count", "best_weights": "arrays"},
    "History": {"history": "lists", "epoch": "counts"},
    "LambdaCallback": {},
    "LearningRateScheduler": {},
    "ModelCheckpoint": _MONITORING | _SAVING,
    "OrbaxCheckpoint": _MONITORING | _SAVING | {"_total_batches_seen": "count"},
    "ProgbarLogger": {"seen": "count", "target": "count", "_called_in_fit": "flag"},
    "ReduceLROnPlateau": _MONITORING | {"wait": "count", "cooldown_counter": "count"},
    "RemoteMonitor": {},
    "SwapEMAWeights": {"_ema_weights_in_model": "flag"},
    "TensorBoard": {
        "_epoch_start_time": "number",
        "_batch_start_time": "number",
        "_global_train_batch": "count",
        "_global_test_batch": "count",
        "_previous_epoch_iterations": "number",
        "_should_write_train_graph": "flag",
        "_train_accumulated_time": "number",
    },
    "TerminateOnNaN": {},
}


def monitored(callback: keras.callbacks.Callback) -> dict[str, str]:
    """Return the arguments of a callback that say which metric its state is about; empty if it monitors none."""
    return {name: str(vars(callback).get(name)) for name in ("monitor", "mode") if isinstance(callback, _MONITORS)}


def set_sign_of_min_delta(callback: keras.callbacks.Callback) -> None:
    """Give ``min_delta``, an argument, the sign that Keras gives it when it chooses ``monitor_op``, which may have been restored."""
    signs = {keras.ops.less: -1, keras.ops.greater: 1}
    sign = signs.get(vars(callback).get("monitor_op")) if isinstance(callback, _MONITORS) else None
    if sign is not None:
        callback.min_delta = abs(callback.min_delta) * sign


def wait_for_callbacks(callbacks: keras.callbacks.CallbackList) -> None:
    """Wait for the methods that Keras calls in threads: those of the last batches, if all callbacks are ``async_safe``.

    Raises:
        Exception: one of these methods has raised it.
    """
    callbacks._flush_futures()


def file_to_empty(callback: keras.callbacks.Callback) -> str | None:
    """Return the name of the file that a callback empties when training begins; None if it empties none."""
    empties = isinstance(callback, keras.callbacks.CSVLogger) and not callback.append
    return callback.filename if empties else None
