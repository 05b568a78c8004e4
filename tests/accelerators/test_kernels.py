"""Fused attention of TPUs and GPUs that are only described: each device runs the kernel on its own rows."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

pytest.importorskip("libtpu", reason="libtpu is not installed: ./scripts/test-accelerators")

from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu.splash_attention import CausalMask, MultiHeadMask, make_splash_mha_single_device

import lockstep
from lockstep._keras import trainer
from tests.accelerators import steps
from tests.support import compile_cache
from tests.support.described import recording

LENGTH = 128


@pytest.fixture(autouse=True, scope="module")
def _compiled_anew():
    """JAX cannot read a program for devices that are only described from its cache."""
    with compile_cache.unused():
        yield


class AttentionOfTPUs(keras.layers.Layer):
    """Calls the kernel that Keras calls on TPUs."""

    def call(self, inputs):
        """Return the causal attention of two heads of 128 units to themselves."""
        heads = jnp.swapaxes(inputs.reshape(*inputs.shape[:2], 2, 128), 1, 2)
        attend = make_splash_mha_single_device(MultiHeadMask([CausalMask((LENGTH, LENGTH))] * 2))
        return jnp.swapaxes(jax.vmap(attend)(heads, heads, heads), 1, 2).reshape(inputs.shape)


def attention_of_gpus(x):
    return keras.layers.MultiHeadAttention(4, 64, dtype="bfloat16")(x, x, use_causal_mask=True)


def compiled(strategy, attention, rows):
    """Return the programs of a training step of a net with this attention."""
    with strategy.scope():
        inputs = keras.Input((LENGTH, 256))
        outputs = keras.layers.Dense(1)(attention(keras.layers.Dense(256)(inputs)))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
    batch = np.zeros((rows, LENGTH, 256), "float32"), np.zeros((rows, LENGTH, 1), "float32")
    state = trainer.training_state(model, tuple(one[:1] for one in batch))
    functions = strategy._functions_of(model)
    with recording() as programs:
        step = functions.build_step(functions.executor, "train")
        functions.executor.compile(step, "train")(tuple(state[part] for part in steps.STATE["train"]), batch)
    return programs


def called(programs, name):
    """Return the number of rows of each kernel of this name in the programs' text."""
    lines = [line for program in programs for line in program.compiled.as_text().splitlines()]
    results = [line.partition(" = ")[2] for line in lines if "custom-call" in line and name in line]
    return [max(int(shape.split(",")[0]) for shape in one.split("[")[1:] if f",{LENGTH}," in shape) for one in results]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("options", "rows"), [({}, 16), ({"shard": "variables"}, 16), ({"deterministic": True}, 19)])
def test_each_tpu_attends_to_its_own_rows(options, rows, caplog):
    strategy = lockstep.MirroredStrategy(steps.devices("v5e 2x2"), **options)
    found = called(compiled(strategy, AttentionOfTPUs(), rows), "tpu_custom_call")
    assert set(found) == ({4} if rows == 16 else {4, 5})
    assert "global batch" not in caplog.text


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("rows", "own"), [(16, 2), (19, 3)])
def test_each_gpu_attends_to_its_own_rows(rows, own, caplog, monkeypatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    strategy = lockstep.MirroredStrategy(steps.devices("H100 x 8"))
    assert called(compiled(strategy, attention_of_gpus, rows), "__cudnn$fmha") == [own, own]
    assert "global batch" not in caplog.text


@pytest.mark.timeout(900)
def test_a_kernel_on_a_mesh_of_tpus_is_an_error():
    strategy = lockstep.ModelParallelStrategy({"data": 2, "model": 2}, devices=steps.devices("v5e 2x2"))
    with pytest.raises(lockstep.LockstepError, match=r"Pallas kernel 'splash_mha.*disable_flash_attention"):
        compiled(strategy, AttentionOfTPUs(), 16)
