"""Two workers fine-tune a model of KerasHub with the numbers of one device, and the chief alone writes it."""

import numpy as np
import pytest

from tests.laws.compare import assert_close

from .kit import keras_hub, named, train

pytestmark = [
    pytest.mark.xdist_group(__name__),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # KerasHub leaves files open.
]


def fine_tune(job, folder, *, lora, shard):
    """Return what the workers have told, and the folder that the chief has written."""
    folder.mkdir()
    told = job(2).run("kerashub", written=str(folder), lora=lora, strategy={"shard": shard}, shard_from=3)
    assert list((folder / "worker1").iterdir()) == []
    assert told[0] == told[1]
    return folder / "worker0"


def assert_same_weights(model, expected):
    for ours, theirs in zip(model.weights, expected.weights, strict=True):
        assert_close(np.asarray(ours), np.asarray(theirs), 1e-5, theirs.path)


@pytest.mark.parametrize("shard", [None, "variables"])
def test_the_chief_alone_writes_presets_and_exports(job, tmp_path, shard):
    from safetensors.numpy import load_file

    written = fine_tune(job, tmp_path / "written", lora=False, shard=shard)
    expected = train(named("gemma"))
    model = train(named("gemma"), epochs=0)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(written / "model.weights.h5")
    for each in (model, keras_hub.models.GemmaCausalLM.from_preset(str(written / "preset"))):
        assert_same_weights(each, expected)
    assert_same_weights(keras_hub.models.GemmaBackbone.from_preset(str(written / "backbone")), expected.backbone)
    model.export_to_transformers(tmp_path / "again")
    ours, again = (load_file(place / "model.safetensors") for place in (written / "transformers", tmp_path / "again"))
    assert ours.keys() == again.keys()
    for name, value in again.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_the_chief_alone_writes_the_weights_of_lora(job, tmp_path):
    written = fine_tune(job, tmp_path / "written", lora=True, shard="variables")
    expected = train(named("gemma"), None, lambda model: model.backbone.enable_lora(4))
    loaded = train(named("gemma"), epochs=0)
    loaded.backbone.load_lora_weights(str(written / "adapters.lora.h5"))
    assert_same_weights(loaded, expected)
