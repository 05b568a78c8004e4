"""Train on Ray with as many workers as the cluster has; if a worker is lost, Ray starts fewer, which resume with the same bits.

    pip install '.[ray]'    # in a checkout of Lockstep
    python examples/ray_train.py --folder /shared/run --workers 1 4          # on CPUs
    python examples/ray_train.py --folder /shared/run --workers 1 4 --gpus   # one GPU a worker

All machines must see the folder.
"""

import argparse
import hashlib
import json
import socket
import tempfile
from pathlib import Path

import ray.train
import ray.train.collective
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer

REPLICAS = 4  # They determine the result: also with fewer workers there are four.


def initialize_jax():
    """Do on CPUs what JaxTrainer does on GPUs and TPUs."""
    import jax

    if jax.distributed.is_initialized():
        return
    context = ray.train.get_context()
    with socket.create_server(("", 0)) as free:
        own = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    address = ray.train.collective.broadcast_from_rank_zero(own)
    jax.distributed.initialize(address, context.get_world_size(), context.get_world_rank())


def report(epoch, logs, folder):
    """Report the logs of an epoch to Ray, and the folder of the checkpoints, which are not copied."""
    with tempfile.TemporaryDirectory() as pointer:
        (Path(pointer) / "checkpoints.json").write_text(json.dumps({"folder": folder}))
        is_chief = ray.train.get_context().get_world_rank() == 0
        ray.train.report({"epoch": epoch, **logs}, checkpoint=Checkpoint.from_directory(pointer) if is_chief else None)


def train(config):
    """Train on one worker; the value of worker 0 is that of the job."""
    initialize_jax()
    import keras
    import numpy as np

    import lockstep

    keras.utils.set_random_seed(1)
    strategy = lockstep.MultiWorkerMirroredStrategy(replicas=REPLICAS, deterministic=True)
    with strategy.scope():
        layers = [keras.layers.Dense(64, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((20,)), *layers])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(4000, 20)).astype("float32")
    y = np.abs(x).sum(axis=1, keepdims=True)
    callbacks = [
        lockstep.callbacks.BackupAndRestore(config["folder"], save_freq=20),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: report(epoch, logs, config["folder"])),
    ]
    model.fit(x, y, batch_size=64, epochs=config["epochs"], callbacks=callbacks, verbose=0)
    weights = b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())
    return {"workers": ray.train.get_context().get_world_size(), "digest": hashlib.sha256(weights).hexdigest()}


def main():
    """Start the training on a cluster, or on this machine if there is none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, help="for the checkpoints; all machines must see it")
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 2), metavar=("MIN", "MAX"))
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    options = parser.parse_args()
    folder = str(Path(options.folder).absolute())
    variables = {"KERAS_BACKEND": "jax", **({} if options.gpus else {"JAX_PLATFORMS": "cpu"})}
    trainer = JaxTrainer(
        train,
        train_loop_config={"folder": folder, "epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=tuple(options.workers), use_gpu=options.gpus),
        run_config=RunConfig(
            storage_path=f"{folder}-ray",
            failure_config=FailureConfig(max_failures=3),
            worker_runtime_env={"env_vars": variables},
        ),
    )
    result = trainer.fit()
    print(json.dumps(result.return_value | {"loss": result.metrics["loss"], "epoch": result.metrics["epoch"]}))


if __name__ == "__main__":
    main()
