"""Fine-tune Gemma with LoRA on several devices, and let it write. Without ``--preset`` the model is tiny and its weights are random.

Needs KerasHub: ``pip install '.[hub]'``.
"""

import argparse
import io
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import keras_hub
import sentencepiece

import lockstep

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--preset", help="a preset of KerasHub, or a folder that save_to_preset has written")
parser.add_argument("--devices", nargs="+", default=["cpu:0", "cpu:1"], help="names of devices, such as gpu:0 gpu:1")
parser.add_argument("--strategy", choices=["mirrored", "sharded", "auto", "map"], default="mirrored")
parser.add_argument("--rank", type=int, default=4, help="rank of LoRA")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--save", help="folder for the trained model, as a preset")
chosen = parser.parse_args()

SENTENCES = [
    "the quick brown fox jumped over the lazy dog",
    "the earth is round",
    "the dog is lazy",
    "the fox is quick",
]


def make_strategy():
    if chosen.strategy in ("mirrored", "sharded"):
        return lockstep.MirroredStrategy(chosen.devices, shard="variables" if chosen.strategy == "sharded" else None)
    mesh = keras.distribution.DeviceMesh((1, len(chosen.devices)), ("batch", "model"), chosen.devices)
    layout = "auto" if chosen.strategy == "auto" else keras_hub.models.GemmaBackbone.get_layout_map(mesh)
    return lockstep.ModelParallelStrategy(mesh, layout, devices=chosen.devices)


def make_tokenizer():
    words, written = {word for sentence in SENTENCES for word in sentence.split()}, io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=written,
        model_type="WORD",
        vocab_size=len(words) + 4,
        minloglevel=2,
        **{"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3},
        **{"pad_piece": "<pad>", "bos_piece": "<bos>", "eos_piece": "<eos>", "unk_piece": "<unk>"},
    )
    return keras_hub.models.GemmaTokenizer(written.getvalue())


def build():
    if chosen.preset:
        return keras_hub.models.GemmaCausalLM.from_preset(chosen.preset)
    tokenizer = make_tokenizer()
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        num_layers=1,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=64,
        intermediate_dim=256,
        head_dim=32,
    )
    preprocessor = keras_hub.models.GemmaCausalLMPreprocessor(tokenizer, sequence_length=12)
    return keras_hub.models.GemmaCausalLM(backbone, preprocessor)


keras.utils.set_random_seed(0)
strategy = make_strategy()
with strategy.scope():
    model = build()
    model.backbone.enable_lora(chosen.rank)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-2), loss, sampler="greedy")
trained = sum(variable.value.size for variable in model.trainable_variables)
print(f"{trained:,} of {model.count_params():,} numbers are trained")
model.fit(SENTENCES, batch_size=4, epochs=chosen.epochs, verbose=2)
print(model.generate("the quick", max_length=12))
if chosen.save:
    model.save_to_preset(chosen.save)
