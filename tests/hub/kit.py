"""Models of KerasHub with the layers of the real ones, at tiny sizes, with random weights; tokenizers with vocabularies made here.

``./scripts/test-hub`` runs these tests in an environment of their own, ``.venv-hub``, where none may be skipped.
"""

import contextlib
import functools
import importlib
import io
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest

import lockstep
from tests.laws.compare import assert_close, state_of

with warnings.catch_warnings():  # Here, as importing TensorFlow changes the environment, which a test must not.
    warnings.simplefilter("ignore")
    if os.environ.get("LOCKSTEP_HUB"):
        importlib.import_module("keras_hub")
    keras_hub: Any = pytest.importorskip("keras_hub", reason="KerasHub is not installed: ./scripts/test-hub runs this")

__all__ = [
    "MODELS",
    "Net",
    "assert_same_state",
    "fit",
    "keras_hub",
    "mirrored",
    "named",
    "sentences",
    "tokens",
    "train",
]

LENGTH = 8  # tokens of a sequence
ROWS = 10
BATCH = 5  # which two replicas share unevenly, and which is the only shape to compile
WORDS = ("the", "quick", "brown", "fox", "jumped", "over", "lazy", "dog", "earth", "is", "round", "at")
CLASSES = 3


@dataclass(frozen=True, eq=False)
class Net:
    """A model and its data.

    Attributes:
        name: after the architecture.
        build: makes the model, which is not compiled.
        data: arguments ``x`` and ``y`` of ``fit``.
        loss: of ``compile``; "auto" for a causal language model.
        relative: how far it may be from plain Keras.
    """

    name: str
    build: Callable[..., keras.Model]
    data: Callable[[], dict[str, Any]]
    loss: Any = "auto"
    relative: float = 1e-5

    def __str__(self) -> str:
        return self.name


def train(
    net: Net,
    strategy: Any = None,
    change: Callable[[Any], None] = lambda model: None,
    epochs: int = 2,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    **options: Any,
) -> keras.Model:
    """Build a model in the scope of a strategy, or with plain Keras, change it, compile it and train it.

    Momentum, and not Adam, which makes a rounding of a small gradient a step of full length.
    """
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(4)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = net.build(**options)
        change(model)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), net.loss)
    if epochs:
        fit(model, net, epochs, callbacks=list(callbacks))
    return model


def fit(model: Any, net: Net, epochs: int = 2, **options: Any) -> dict[str, list[float]]:
    """Train a model on the data of its kind, and return the history."""
    return model.fit(**net.data(), batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **options).history


def assert_same_state(model: keras.Model, expected: keras.Model, relative: float = 1e-5) -> None:
    """Assert that all variables of two models and their optimizers agree, relative to the largest number of each."""
    ours, theirs = state_of(model), state_of(expected)
    assert len(ours) == len(theirs)
    for (name, value), other in zip(ours.items(), theirs.values(), strict=True):
        assert_close(value, other, relative, name)


def mirrored(**options: Any) -> lockstep.MirroredStrategy:
    """Return a strategy of two replicas on two devices."""
    return lockstep.MirroredStrategy(["cpu:0", "cpu:1"], **options)


def named(name: str) -> Net:
    """Return the model of this name."""
    return next(net for net in MODELS if net.name == name)


# Data.


def sentences(rows: int = ROWS) -> list[str]:
    """Return sentences of different lengths, so that rows have padding."""
    generator = np.random.default_rng(3)
    return [" ".join(generator.choice(WORDS, 2 + number % 5)) for number in range(rows)]


def texts() -> dict[str, Any]:
    return {"x": sentences()}


def labelled_texts() -> dict[str, Any]:
    return {"x": sentences(), "y": labels()}


def labels() -> np.ndarray:
    return (np.arange(ROWS) % CLASSES).astype("int32")


def images(rows: int = ROWS, size: int = 16) -> dict[str, Any]:
    values = np.random.default_rng(5).uniform(0, 255, size=(rows, size, size, 3))
    return {"x": values.astype("float32"), "y": labels()}


def tokens(vocabulary: int = 24) -> dict[str, Any]:
    """Tensors that a preprocessor would return, for a causal language model."""
    generator = np.random.default_rng(6)
    ids = generator.integers(1, vocabulary, (ROWS, LENGTH + 1)).astype("int32")
    mask = np.arange(LENGTH)[None] < generator.integers(3, LENGTH + 1, (ROWS, 1))
    x = {"token_ids": ids[:, :-1], "padding_mask": mask.astype("int32")}
    return {"x": x, "y": ids[:, 1:], "sample_weight": mask.astype("float32")}


# Tokenizers.


@functools.cache
def sentence_piece(*pieces: str) -> bytes:
    """Return a model of SentencePiece for the words, with these special pieces at the first places."""
    import sentencepiece

    written = io.BytesIO()
    numbers = {piece: number for number, piece in enumerate(pieces)}
    options: dict[str, Any] = {"user_defined_symbols": [piece for piece in pieces if piece == "[MASK]"]}
    for kind, spellings in {
        "pad": ("<pad>", "[PAD]"),
        "bos": ("<bos>", "<s>", "[CLS]"),
        "eos": ("<eos>", "</s>", "[SEP]"),
        "unk": ("<unk>", "[UNK]"),
    }.items():
        piece = next((spelling for spelling in spellings if spelling in numbers), None)
        options[f"{kind}_id"] = -1 if piece is None else numbers[piece]
        if piece is not None:
            options[f"{kind}_piece"] = piece
    size = len(WORDS) + len(pieces)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences(50)),
        model_writer=written,
        vocab_size=size,
        model_type="WORD",
        minloglevel=2,
        **options,
    )
    return written.getvalue()


def gemma_preprocessor() -> Any:
    tokenizer = keras_hub.models.GemmaTokenizer(sentence_piece("<pad>", "<bos>", "<eos>", "<unk>"))
    return keras_hub.models.GemmaCausalLMPreprocessor(tokenizer, sequence_length=LENGTH)


def llama_preprocessor() -> Any:
    tokenizer = keras_hub.models.LlamaTokenizer(sentence_piece("<unk>", "<s>", "</s>"))
    return keras_hub.models.LlamaCausalLMPreprocessor(tokenizer, sequence_length=LENGTH)


def gpt2_preprocessor() -> Any:
    letters = sorted({letter for word in WORDS for letter in word} | {"Ġ"})
    merges = ["Ġ t", "h e", "Ġt he", "Ġ q", "u i", "Ġ f", "o x", "Ġf ox"]
    spelled = [*letters, *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    tokenizer = keras_hub.models.GPT2Tokenizer({piece: number for number, piece in enumerate(spelled)}, merges)
    return keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=LENGTH)


def bert_preprocessor() -> Any:
    tokenizer = keras_hub.models.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    return keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=LENGTH)


def deberta_preprocessor() -> Any:
    tokenizer = keras_hub.models.DebertaV3Tokenizer(sentence_piece("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"))
    return keras_hub.models.DebertaV3TextClassifierPreprocessor(tokenizer, sequence_length=LENGTH)


# Models.


def gemma(
    layers: int = 1, width: int = 16, vocabulary: int = 24, preprocessor: bool = True, **options: Any
) -> keras.Model:
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=vocabulary,
        num_layers=layers,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=width,
        intermediate_dim=4 * width,
        head_dim=width // 2,
        **options,
    )
    return keras_hub.models.GemmaCausalLM(backbone, gemma_preprocessor() if preprocessor else None)


def llama(
    layers: int = 1, width: int = 16, vocabulary: int = 24, preprocessor: bool = True, **options: Any
) -> keras.Model:
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=vocabulary,
        num_layers=layers,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=width,
        intermediate_dim=4 * width,
        **options,
    )
    return keras_hub.models.LlamaCausalLM(backbone, llama_preprocessor() if preprocessor else None)


def gpt2(
    layers: int = 1, width: int = 16, vocabulary: int = 40, preprocessor: bool = True, **options: Any
) -> keras.Model:
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=vocabulary,
        num_layers=layers,
        num_heads=4,
        hidden_dim=width,
        intermediate_dim=4 * width,
        max_sequence_length=2 * LENGTH,
        **{"dropout": 0.0} | options,
    )
    return keras_hub.models.GPT2CausalLM(backbone, gpt2_preprocessor() if preprocessor else None)


def _decoder(
    backbone: Any, task: Any, layers: int = 1, width: int = 16, vocabulary: int = 24, **options: Any
) -> keras.Model:
    """Return a decoder with two heads of keys for four of queries, and no preprocessor."""
    sizes = {"num_layers": layers, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": width}
    return task(backbone(vocabulary_size=vocabulary, intermediate_dim=4 * width, **sizes, **options), None)


def _experts(width: int = 16, **options: Any) -> dict[str, Any]:
    return {"width": width, "moe_intermediate_dim": 2 * width, "num_experts": 4, "top_k": 2} | options


def qwen(**options: Any) -> keras.Model:
    return _decoder(keras_hub.models.QwenBackbone, keras_hub.models.QwenCausalLM, **options)


def qwen_moe(width: int = 16, **options: Any) -> keras.Model:
    own = _experts(width, shared_expert_intermediate_dim=2 * width, **options)
    return _decoder(keras_hub.models.QwenMoeBackbone, keras_hub.models.QwenMoeCausalLM, **own)


def qwen3_moe(**options: Any) -> keras.Model:
    own = _experts(head_dim=8, **options)
    return _decoder(keras_hub.models.Qwen3MoeBackbone, keras_hub.models.Qwen3MoeCausalLM, **own)


def bert(**options: Any) -> keras.Model:
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=24,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        dropout=0.0,
        max_sequence_length=16,
        **options,
    )
    return keras_hub.models.BertTextClassifier(backbone, CLASSES, bert_preprocessor(), dropout=0.0)


def deberta(**options: Any) -> keras.Model:
    backbone = keras_hub.models.DebertaV3Backbone(
        vocabulary_size=24,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        dropout=0.0,
        max_sequence_length=16,
        bucket_size=4,
        **options,
    )
    return keras_hub.models.DebertaV3TextClassifier(backbone, CLASSES, deberta_preprocessor(), dropout=0.0)


def vit() -> keras.Model:
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(16, 16, 3), patch_size=4, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32
    )
    converter = keras_hub.layers.ViTImageConverter(image_size=(16, 16), scale=1 / 255)
    preprocessor = keras_hub.models.ViTImageClassifierPreprocessor(converter)
    return keras_hub.models.ViTImageClassifier(backbone, CLASSES, preprocessor, pooling="token")


def resnet() -> keras.Model:
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=(16, 16, 3),
    )
    preprocessor = keras_hub.models.ResNetImageClassifierPreprocessor(
        keras_hub.layers.ResNetImageConverter(image_size=(16, 16), scale=1 / 255)
    )
    return keras_hub.models.ResNetImageClassifier(backbone, CLASSES, preprocessor)


def whisper() -> keras.Model:
    """The encoder and decoder of Whisper with the product by its embeddings, as tokens are predicted from audio."""
    backbone = keras_hub.models.WhisperBackbone(
        vocabulary_size=24,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        num_mels=8,
        max_encoder_sequence_length=24,
        max_decoder_sequence_length=LENGTH,
    )
    logits = backbone.token_embedding(backbone.output["decoder_sequence_output"], reverse=True)
    return keras.Model(backbone.input, logits)


def speech() -> dict[str, Any]:
    data = tokens()
    features = np.random.default_rng(7).normal(size=(ROWS, 24, 8)).astype("float32")
    x = {"encoder_features": features, "decoder_token_ids": data["x"]["token_ids"]}
    return data | {"x": x | {"decoder_padding_mask": data["x"]["padding_mask"]}}


def diffuser() -> keras.Model:
    """The transformer of Stable Diffusion 3."""
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    return MMDiT(
        patch_size=2,
        hidden_dim=16,
        num_layers=1,
        num_heads=2,
        position_size=8,
        latent_shape=(8, 8, 4),
        context_shape=(6, 12),
        pooled_projection_shape=(10,),
        qk_norm="rms_norm",
    )


def noised() -> dict[str, Any]:
    generator = np.random.default_rng(9)

    def normal(*shape: int) -> np.ndarray:
        return generator.normal(size=(ROWS, *shape)).astype("float32")

    x = {"latent": normal(8, 8, 4), "context": normal(6, 12), "pooled_projection": normal(10)}
    x["timestep"] = generator.uniform(0, 1000, (ROWS, 1)).astype("float32")
    return {"x": x, "y": normal(8, 8, 4)}


def logits_loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


MODELS = (
    Net("gpt2", gpt2, texts),
    Net("gemma", gemma, texts),
    Net("llama", llama, texts),
    Net("qwen", qwen, tokens),
    Net("qwen_moe", qwen_moe, tokens),
    Net("qwen3_moe", qwen3_moe, tokens),
    Net("bert", bert, labelled_texts, logits_loss()),
    Net("deberta", deberta, labelled_texts, logits_loss()),
    Net("vit", vit, images, logits_loss()),
    Net("resnet", resnet, images, logits_loss()),
    Net("whisper", whisper, speech, logits_loss()),
    Net("stable_diffusion_3", diffuser, noised, "mse"),
)
