"""LoRA, quantised weights and rematerialization on two devices: the numbers of one, and only what is to be trained changes."""

import dataclasses
import functools

import jax
import keras
import numpy as np
import pytest

from .kit import assert_same_state, fit, mirrored, named, tokens, train

pytestmark = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")


def add_lora(model):
    model.backbone.enable_lora(4)


def quantized_lora(mode):
    def change(model):
        model.backbone.quantize(mode)  # Keras cannot quantise a tokenizer, which is in the task.
        add_lora(model)

    return change


def changed(model, initial):
    """Return the paths of the variables that a training has changed."""
    return {
        ours.path
        for ours, before in zip(model.weights, initial.weights, strict=True)
        if not np.array_equal(np.asarray(ours), np.asarray(before))
    }


@pytest.mark.parametrize(("name", "shard"), [("gemma", None), ("gemma", "variables"), ("llama", "variables")])
def test_lora_trains_its_own_weights_only(shard_all, name, shard):
    net = named(name)
    model = train(net, mirrored(shard=shard), add_lora)
    assert_same_state(model, train(net, None, add_lora))
    initial = train(net, None, add_lora, epochs=0)
    paths = changed(model, initial)
    assert paths == {variable.path for variable in model.trainable_variables}
    assert all("lora_kernel" in path for path in paths)
    if shard:
        kernel = model.backbone.token_embedding.embeddings.value
        assert len({str(shard.index) for shard in kernel.addressable_shards}) == 2


def test_lora_is_enabled_between_two_trainings():
    """The program of the first, with all weights, is not used for the second."""
    net = named("gemma")
    models = [train(net, strategy, epochs=1) for strategy in (mirrored(), None)]
    for model in models:
        keras.utils.set_random_seed(5)
        add_lora(model)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), net.loss)
        fit(model, net, epochs=1)
    assert all("lora" in variable.path for variable in models[0].trainable_variables)
    assert_same_state(*models)


@pytest.mark.parametrize(("mode", "shard"), [("int8", None), ("int4", "variables")])
def test_lora_on_quantised_weights(shard_all, mode, shard, caplog):
    net = named("gemma")
    with caplog.at_level("INFO", logger="lockstep"):
        model = train(net, mirrored(shard=shard), quantized_lora(mode))
    assert "global batch" not in caplog.text
    expected = train(net, None, quantized_lora(mode))
    kernel = model.backbone.get_layer("decoder_block_0").attention.query_dense._kernel
    assert kernel.dtype == "int8"  # int4 is kept in bytes, two in each
    assert all("lora_kernel" in variable.path for variable in model.trainable_variables)
    # Activations are rounded to 8 bits, too: a last bit may decide which of two neighbours is taken.
    assert_same_state(model, expected, 1e-3)


@pytest.mark.parametrize(
    ("mode", "options"),
    [("activations", {}), ("list_of_layers", {}), ("list_of_layers", {"shard": "variables", "recompute": "blocks"})],
)
def test_rematerialization_does_not_change_the_numbers(shard_all, mode, options):
    net = dataclasses.replace(named("gemma"), data=tokens)
    names = {"layer_names": ["decoder_block_0"]} if mode == "list_of_layers" else {}

    def rematerialized():
        with keras.RematScope(mode, **names):
            return net.build(preprocessor=False)

    model = train(dataclasses.replace(net, build=rematerialized), mirrored(**options))
    inputs = {name: np.ones((2, 8), "int32") for name in ("token_ids", "padding_mask")}
    forward = functools.partial(model.stateless_call, non_trainable_variables=[], inputs=inputs)
    program = jax.make_jaxpr(forward)([variable.value for variable in model.trainable_variables])
    assert any(equation.primitive.name in ("checkpoint", "remat2") for equation in program.eqns)
    assert_same_state(model, plain_on_tokens())


@functools.cache
def plain_on_tokens():
    return train(dataclasses.replace(named("gemma"), data=tokens), preprocessor=False)
