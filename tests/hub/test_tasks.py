"""Task models of KerasHub on two replicas: their preprocessing, training, generation and files are those of one device."""

import functools

import keras
import numpy as np
import pytest

import lockstep
from tests.laws.compare import assert_close
from tests.laws.naive import naive_fit

from .kit import BATCH, MODELS, assert_same_state, fit, keras_hub, mirrored, named, sentences, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.compile... was not called as part of model loading"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # KerasHub leaves files open.
]

# The sums over the rows in their experts' choice make XLA divide the global batch, which has the numbers of one device, too.
ON_THE_GLOBAL_BATCH = {"qwen_moe"}
OTHER_TESTS_HAVE_THEM = {"resnet", "bert", "qwen3_moe"}


def cases():
    for net in MODELS:
        if net.name not in OTHER_TESTS_HAVE_THEM:
            yield pytest.param(net, id=net.name, marks=pytest.mark.xdist_group(net.name))


@pytest.mark.parametrize("net", list(cases()))
def test_a_model_has_the_numbers_of_one_device(net, caplog):
    with caplog.at_level("INFO", "lockstep"):
        found = train(net, mirrored())
    assert ("global batch" in caplog.text) == (net.name in ON_THE_GLOBAL_BATCH)
    assert_same_state(found, train(net), net.relative)


def test_batch_normalization_is_that_of_each_replica():
    """A ResNet does what the written-out loop over replicas does."""
    net = named("resnet")
    found, expected = train(net, mirrored()), train(net, epochs=0)
    data = net.data()
    images = np.asarray(expected.preprocessor(data["x"]))
    naive_fit(expected, images, data["y"], batch_size=BATCH, replicas=2, epochs=2)
    for ours, theirs in zip(found.variables, expected.variables, strict=True):
        assert_close(np.asarray(ours.value), np.asarray(theirs.value), 1e-5, ours.path)


def test_batch_normalization_of_a_backbone_can_be_synchronized():
    def synchronize(model):
        for layer in model.backbone.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = True

    net = named("resnet")
    assert_same_state(train(net, mirrored(), synchronize), train(net))


def test_a_head_is_trained_on_a_frozen_backbone_and_then_both():
    net = named("resnet")

    def freeze(model):
        model.backbone.trainable = False

    found, expected = train(net, mirrored(), freeze), train(net, None, freeze)
    assert_same_state(found, expected)
    for model in (found, expected):
        model.backbone.trainable = True
        for layer in model.backbone._flatten_layers():
            layer.trainable = not isinstance(layer, keras.layers.BatchNormalization)
        model.compile(keras.optimizers.SGD(0.01), net.loss)
        fit(model, net)
    assert_same_state(found, expected)


@pytest.mark.parametrize("source", ["tensorflow", "grain"])
def test_preprocessing_runs_in_each_kind_of_pipeline(source, monkeypatch):
    """KerasHub takes Grain where it is installed, and tf.data otherwise."""
    from keras_hub.src.utils import pipeline_model

    net = named("gemma")
    used = []
    apply = pipeline_model._apply_preprocessing
    monkeypatch.setattr(
        pipeline_model, "_apply_preprocessing", lambda dataset, *rest: (used.append(dataset), apply(dataset, *rest))[1]
    )
    if source == "tensorflow":
        monkeypatch.setattr(pipeline_model, "grain", None)
    found = train(net, mirrored())
    predictions = found.predict(sentences(), batch_size=BATCH, verbose=0)
    assert type(used[0]).__module__.startswith(source)
    assert_same_state(found, plain_gemma())
    np.testing.assert_allclose(
        predictions, plain_gemma().predict(sentences(), batch_size=BATCH, verbose=0), rtol=1e-4, atol=1e-5
    )


def test_validation_data_are_prepared_too():
    net = named("bert")
    found, models = [], []
    for strategy in (mirrored(), None):
        model = train(net, strategy, epochs=0)
        found.append(fit(model, net, validation_data=tuple(net.data().values())))
        models.append(model)
    assert_same_state(*models)
    assert found[0].keys() == found[1].keys() >= {"val_loss", "val_sparse_categorical_accuracy"}
    for name, values in found[1].items():
        np.testing.assert_allclose(found[0][name], values, rtol=1e-5)


@functools.cache
def plain_gemma():
    return train(named("gemma"))


class StopAfter(keras.callbacks.Callback):
    """Ends a training in its second epoch, after the first of two batches."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1 and batch == 0:
            raise KeyboardInterrupt


def test_a_training_with_preprocessing_resumes_with_the_same_bits(tmp_path):
    net = named("gemma")
    expected = train(net, mirrored(), epochs=3)

    def backup():
        return lockstep.callbacks.BackupAndRestore(tmp_path, save_freq=1)

    with pytest.raises(KeyboardInterrupt):
        train(net, mirrored(), epochs=3, callbacks=[backup(), StopAfter()])
    assert_same_state(train(net, mirrored(), epochs=3, callbacks=[backup()]), expected, 0)


def test_bfloat16_is_that_of_one_device():
    net = named("gemma")
    found, expected = train(net, mirrored(), dtype="mixed_bfloat16"), train(net, dtype="mixed_bfloat16")
    assert expected.backbone.get_layer("decoder_block_0").compute_dtype == "bfloat16"
    assert_same_state(found, expected, 0.02)  # bfloat16 rounds at 2**-8, and two replicas add other partial sums.


STRATEGIES = {
    "sharded": lambda: mirrored(shard="variables"),
    "mesh": lambda: lockstep.ModelParallelStrategy({"data": 1, "model": 2}, devices=["cpu:0", "cpu:1"]),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generation_and_files_are_those_of_one_device(strategy, tmp_path):
    net, expected = named("gemma"), plain_gemma()
    strategy = STRATEGIES[strategy]()
    model = train(net, strategy)
    prompts = ["the quick", "earth is round"]

    def words_of(trained):
        trained.compile(sampler="greedy")
        return trained.generate(prompts, max_length=8)

    words = words_of(model)
    assert words == words_of(expected)
    model.save(tmp_path / "model.keras")
    model.save_to_preset(tmp_path / "preset")
    again = [keras.models.load_model(tmp_path / "model.keras")]
    with strategy.scope():
        again.append(keras_hub.models.GemmaCausalLM.from_preset(str(tmp_path / "preset")))
    for each in again:
        for ours, theirs in zip(each.weights, model.weights, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        assert words_of(each) == words
        fit(each, net, epochs=1)


@pytest.mark.parametrize("name", ["gemma", "gpt2"])
def test_an_export_for_transformers_has_the_trained_weights(name, tmp_path):
    from safetensors.numpy import load_file

    net = named(name)
    model = train(net, mirrored(shard="variables"), epochs=1)
    model.export_to_transformers(tmp_path / "ours")
    plain = train(net, epochs=0)
    for ours, theirs in zip(model.weights, plain.weights, strict=True):
        theirs.assign(np.asarray(ours))
    plain.export_to_transformers(tmp_path / "plain")
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == sorted(
        path.name for path in (tmp_path / "plain").iterdir()
    )
    found, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "plain"))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value)
