"""``get_layout_map`` of KerasHub's backbones under ``ModelParallelStrategy``: the numbers of one device, and no rule that fails in silence."""

import dataclasses
import re

import jax
import keras
import pytest

import lockstep
from lockstep._keras import trainer
from lockstep.tools.plan.hlo import collectives

from .kit import assert_same_state, keras_hub, named, tokens, train

BACKBONES = {
    "gemma": "GemmaBackbone",
    "llama": "LlamaBackbone",
    "qwen": "QwenBackbone",
    "qwen_moe": "QwenMoeBackbone",
    "qwen3_moe": "Qwen3MoeBackbone",
}
CPUS = [f"cpu:{number}" for number in range(4)]
WIDE = {"width": 64, "vocabulary": 256, "layers": 2}


def given_layout(name, sizes):
    """Return the strategy of a backbone's own layout map."""
    devices = CPUS[: sizes[0] * sizes[1]]
    mesh = keras.distribution.DeviceMesh(sizes, ("batch", "model"), devices)
    layout = getattr(keras_hub.models, BACKBONES[name]).get_layout_map(mesh)
    return lockstep.ModelParallelStrategy(mesh, layout, devices=devices)


def test_these_backbones_have_a_layout_map():
    names = [name for name in dir(keras_hub.models) if hasattr(getattr(keras_hub.models, name), "get_layout_map")]
    inherited = {"Llama3Backbone", "Qwen2Backbone"}  # those of Llama and Qwen
    assert {*names} == {*BACKBONES.values()} | inherited


# In Qwen3MoE all products are those of experts, which no rule of its map names.
UNMATCHED = {
    "qwen3_moe": [f"transformer_layer.*feedforward_{kind}_dense.kernel" for kind in ("intermediate", "output")]
}


@pytest.mark.parametrize("name", BACKBONES)
def test_a_layout_map_is_taken_as_it_is(name, caplog):
    net, strategy = named(name), given_layout(name, (2, 2))
    with caplog.at_level("INFO", "lockstep"):
        model = train(net, strategy)
    assert_same_state(model, train(net))
    assert re.findall("rule '(.*)' matches none of its variables", caplog.text) == UNMATCHED.get(name, [])
    experts = [
        row.path for row in strategy.layout(model).variables if "/experts/" in row.path and row.bytes >= 4 * 4096
    ]
    assert bool(experts) == ("moe" in name)
    for path in experts:
        assert f"variable {path!r} (16.0 KiB) is whole on each device: no rule matches it" in caplog.text


# Bytes on each of two devices, as a share of all: of the map, and at most of the automatic layout.
SHARES = {
    "gemma": (0.51, 0.51),
    "llama": (0.56, 0.51),  # The map leaves the weights of the last product whole,
    "qwen": (0.51, 0.51),
    "qwen_moe": (0.86, 0.51),  # and those of experts, which auto shards,
    "qwen3_moe": (0.94, 0.53),  # also of Qwen3MoE.
}


def exchanged(strategy, model, data):
    """Number of collectives of a training step, and bytes of their results on a device."""
    batch = jax.tree.map(lambda leaf: leaf[:4], (data["x"], data["y"]))
    state = trainer.training_state(model, batch)
    functions = strategy._functions_of(model)
    functions.executor.prepare(batch)
    step = functions.executor.train_step(functions.build_step(functions.executor, "train"))
    found = collectives(step.compile_for(state, strategy._placement.abstract_batch(batch)).as_text())
    return len(found), sum(one.bytes for one in found)


@pytest.mark.parametrize("name", BACKBONES)
def test_the_automatic_layout_needs_no_more_memory_and_collectives_than_the_map(name):
    net = dataclasses.replace(named(name), data=lambda: tokens(256))
    auto = lockstep.ModelParallelStrategy({"batch": 1, "model": 2}, devices=CPUS[:2])
    text = {"preprocessor": False} if name in ("gemma", "llama") else {}
    found, numbers, sizes = [], [], []
    for strategy in (given_layout(name, (1, 2)), auto):
        model = train(net, strategy, epochs=0, **WIDE, **text)
        layout = strategy.layout(model)
        found.append(layout.device_bytes / layout.bytes)
        for values, value in zip((numbers, sizes), exchanged(strategy, model, net.data()), strict=True):
            values.append(value)
    assert numbers[1] <= numbers[0]
    assert sizes[1] <= sizes[0]
    assert found[1] <= found[0] + 0.001
    assert [share <= limit for share, limit in zip(found, SHARES[name], strict=True)] == [True, True], found


def test_the_automatic_layout_of_a_language_model_has_the_numbers_of_one_device():
    net = dataclasses.replace(named("gemma"), data=lambda: tokens(256))
    strategy = lockstep.ModelParallelStrategy({"batch": 2, "model": 2}, devices=CPUS)
    wide = WIDE | {"preprocessor": False}
    assert_same_state(train(net, strategy, **wide), train(net, None, **wide))


def test_lora_on_a_mesh_trains_its_own_weights_only():
    net = named("gemma")

    def add_lora(model):
        model.backbone.enable_lora(4)

    model = train(net, given_layout("gemma", (1, 2)), add_lora)
    assert all("lora_kernel" in variable.path for variable in model.trainable_variables)
    assert_same_state(model, train(net, None, add_lora))
