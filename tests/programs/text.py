"""Text, sound and series."""

import keras
import numpy as np
from keras import layers, losses, ops

from .kit import ROWS, OwnStep, Program, compiled, logits
from .vision import Positions

WORDS, LENGTH = 30, 9


def words(rng, classes=2):
    x = rng.integers(1, WORDS, (ROWS, LENGTH))
    for row, length in enumerate(rng.integers(3, LENGTH + 1, ROWS)):
        x[row, length:] = 0
    return {"x": x, "y": rng.integers(0, classes, ROWS)}


def text():
    return keras.Input((LENGTH,), dtype="int32")


def text_convolutions(noise):
    inputs = text()
    x = noise.dropout()(layers.Embedding(WORDS, 6)(inputs))
    x = layers.Conv1D(6, 4, padding="valid", activation="relu", strides=2)(x)
    x = noise.dropout()(layers.Dense(6, activation="relu")(layers.GlobalMaxPooling1D()(x)))
    return compiled(keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x)), "binary_crossentropy", ["accuracy"])


def bidirectional_lstm(noise):
    inputs = text()
    x = layers.Embedding(WORDS, 6)(inputs)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(4))(x)
    return compiled(keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x)), "binary_crossentropy", ["accuracy"])


class Block(layers.Layer):
    """A block of a transformer."""

    def __init__(self, noise, width=8, causal=False):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4, dropout=noise.rate)
        self.inner = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.drops = [noise.dropout() for _ in range(2)]
        self.causal, self.supports_masking = causal, True

    def build(self, shape):
        self.attention.build(shape, shape)
        self.inner.build(shape)
        for norm in self.norms:
            norm.build(shape)

    def call(self, x, mask=None, training=None):
        seen = self.attention(x, x, use_causal_mask=self.causal, training=training)
        x = self.norms[0](x + self.drops[0](seen, training=training))
        return self.norms[1](x + self.drops[1](self.inner(x), training=training))


def text_transformer(noise):
    inputs = text()
    x = Block(noise)(Positions()(layers.Embedding(WORDS, 8)(inputs)))
    x = noise.dropout()(layers.GlobalAveragePooling1D()(x))
    return compiled(keras.Model(inputs, layers.Dense(2)(x)), logits(), ["accuracy"])


def miniature_gpt(noise):
    inputs = text()
    x = Block(noise, causal=True)(Positions()(layers.Embedding(WORDS, 8)(inputs)))
    return compiled(keras.Model(inputs, layers.Dense(WORDS)(x)), logits())


def next_words(rng):
    x = rng.integers(1, WORDS, (ROWS, LENGTH + 1))
    return {"x": x[:, :-1], "y": x[:, 1:]}


def fourier_net(noise):
    inputs = text()
    x = Positions()(layers.Embedding(WORDS, 8)(inputs))
    real, _ = ops.fft2((x, ops.zeros_like(x)))
    x = layers.LayerNormalization()(x + real)
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(8, activation="relu")(x)))
    return compiled(keras.Model(inputs, layers.Dense(2)(noise.dropout()(layers.GlobalAveragePooling1D()(x)))), logits())


class Experts(layers.Layer):
    """A switch: each word goes to one expert, and each expert takes so many words of the whole batch."""

    def build(self, shape):
        self.router = layers.Dense(3)
        self.router.build(shape)
        self.kernel = self.add_weight(shape=(3, shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        tokens = ops.reshape(x, (-1, x.shape[-1]))
        chances = ops.softmax(self.router(tokens))
        chosen = ops.one_hot(ops.argmax(chances, -1), 3)
        place = ops.cumsum(chosen, axis=0) * chosen
        room = 0.4 * ops.cast(ops.shape(tokens)[0], "float32")
        chosen = chosen * ops.cast(place <= room, "float32")  # Full experts take no more.
        found = ops.einsum("te,td,edo->to", chosen * chances, tokens, self.kernel)
        return ops.reshape(found, ops.shape(x))


def switch_transformer(noise):
    inputs = text()
    x = Experts()(Positions()(layers.Embedding(WORDS, 8)(inputs)))
    return compiled(keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x))), logits())


def sequence_to_sequence(noise):
    source, target = keras.Input((6, 5)), keras.Input((7, 4))
    _, *state = layers.LSTM(6, return_state=True)(source)
    x = layers.LSTM(6, return_sequences=True)(target, initial_state=state)
    return compiled(keras.Model([source, target], layers.Dense(4, activation="softmax")(x)), "categorical_crossentropy")


def pairs(rng):
    x = [rng.random((ROWS, 6, 5), "float32"), rng.random((ROWS, 7, 4), "float32")]
    return {"x": x, "y": np.eye(4, dtype="float32")[rng.integers(0, 4, (ROWS, 7))]}


def addition(noise):
    model = keras.Sequential([keras.Input((7, 12)), layers.LSTM(8), layers.RepeatVector(4)])
    model.add(layers.LSTM(8, return_sequences=True))
    model.add(layers.Dense(12, activation="softmax"))
    return compiled(model, "categorical_crossentropy", ["accuracy"])


def sums(rng):
    code = np.eye(12, dtype="float32")
    return {"x": code[rng.integers(0, 12, (ROWS, 7))], "y": code[rng.integers(0, 12, (ROWS, 4))]}


class MaskedLoss(losses.Loss):
    """Over the words that are no padding."""

    def call(self, y_true, y_pred):
        found = ops.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        mask = ops.cast(y_true > 0, "float32")
        return ops.sum(found * mask) / (1e-6 + ops.sum(mask))


def named_entities(noise):
    inputs = text()
    x = noise.dropout()(Block(noise)(Positions()(layers.Embedding(WORDS, 8)(inputs))))
    return compiled(keras.Model(inputs, layers.Dense(5)(x)), MaskedLoss())


def tags(rng):
    data = words(rng)
    return data | {"y": rng.integers(1, 5, (ROWS, LENGTH)) * (data["x"] > 0)}


class MaskedLanguage(OwnStep):
    """Some words are hidden, and the loss counts these alone."""

    def __init__(self, noise):
        super().__init__()
        x = inputs = text()
        x = Block(noise)(Positions()(layers.Embedding(WORDS, 8)(x)))
        self.net = keras.Model(inputs, layers.Dense(WORDS)(x))
        self.built = True

    def call(self, x, training=None):
        return self.net(x, training=training)

    def losses_of(self, trainable, non_trainable, data):
        x, y, weights = data
        found, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
        each = ops.sparse_categorical_crossentropy(y, found, from_logits=True)
        loss = ops.sum(each * weights) / ops.sum(weights)
        return loss, {"hidden": loss}, non_trainable


def hidden_words(rng):
    x = rng.integers(2, WORDS, (ROWS, LENGTH))
    mask = rng.random((ROWS, LENGTH)) < 0.3
    mask[:, 0] = True
    return {"x": np.where(mask, 1, x), "y": x, "sample_weight": mask.astype("float32")}


# --- sound and series ------------------------------------------------------------------------------------------------------


class Transcribed(losses.Loss):
    """Connectionist temporal classification."""

    def call(self, y_true, y_pred):
        lengths = ops.full((len(y_pred),), y_pred.shape[1], "int32")
        return ops.ctc_loss(y_true, y_pred, ops.full((len(y_pred),), y_true.shape[1], "int32"), lengths, mask_index=0)


def speech(noise):
    inputs = keras.Input((12, 8))
    x = layers.Reshape((12, 8, 1))(inputs)
    x = layers.Activation("relu")(noise.normalization()(layers.Conv2D(3, 3, strides=(1, 2), padding="same")(x)))
    x = layers.Reshape((12, 12))(x)
    x = noise.dropout(0.5)(layers.Bidirectional(layers.GRU(5, return_sequences=True))(x))
    return compiled(keras.Model(inputs, layers.Dense(6)(x)), Transcribed())


def utterances(rng):
    return {"x": rng.random((ROWS, 12, 8), "float32"), "y": rng.integers(1, 6, (ROWS, 4))}


class Spectrum(layers.Layer):
    """How loud each frequency of a sound is."""

    def call(self, x):
        return ops.absolute(ops.stack(ops.rfft(x), -1)[..., 0])[..., None]


def speaker(noise):
    inputs = keras.Input((32,))
    x = Spectrum()(inputs)
    shortcut = layers.Conv1D(4, 1, padding="same")(x)
    x = layers.Conv1D(4, 3, padding="same")(layers.Activation("relu")(layers.Conv1D(4, 3, padding="same")(x)))
    x = layers.MaxPool1D(2)(layers.Activation("relu")(x + shortcut))
    x = layers.Flatten()(layers.AveragePooling1D(3, strides=3)(x))
    return compiled(keras.Model(inputs, layers.Dense(3)(x)), logits(), ["accuracy"])


def series_convolutions(noise):
    x = inputs = keras.Input((16, 1))
    for _ in range(2):
        x = layers.ReLU()(noise.normalization()(layers.Conv1D(6, 3, padding="same")(x)))
    return compiled(keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x))), logits(), ["accuracy"])


def series_transformer(noise):
    x = inputs = keras.Input((16, 1))
    seen = noise.dropout()(layers.MultiHeadAttention(2, 4, dropout=noise.rate)(x, x))
    x = x + layers.LayerNormalization(epsilon=1e-6)(seen)
    x = x + layers.Conv1D(1, 1)(noise.dropout()(layers.Conv1D(4, 1, activation="relu")(x)))
    x = layers.GlobalAveragePooling1D(data_format="channels_first")(x)
    return compiled(keras.Model(inputs, layers.Dense(2)(layers.Dense(8, activation="relu")(x))), logits())


def anomalies(noise):
    inner = [layers.Conv1D(6, 5, padding="same", strides=2, activation="relu"), noise.dropout()]
    inner += [layers.Conv1D(4, 5, padding="same", strides=2, activation="relu")]
    inner += [layers.Conv1DTranspose(4, 5, padding="same", strides=2, activation="relu"), noise.dropout()]
    inner += [layers.Conv1DTranspose(6, 5, padding="same", strides=2, activation="relu")]
    return compiled(keras.Sequential([keras.Input((16, 1)), *inner, layers.Conv1DTranspose(1, 5, padding="same")]))


def weather(noise):
    return compiled(keras.Sequential([keras.Input((12, 5)), layers.LSTM(6), layers.Dense(1)]))


class RoadGraph(layers.Layer):
    """Sums over the neighbours of each road, whose pairs are known beforehand, and an LSTM over time."""

    def build(self, shape):
        self.pairs = np.array([[0, 1, 1, 2, 3, 4, 0], [1, 0, 2, 1, 4, 3, 4]])
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.lstm, self.last = layers.LSTM(4), layers.Dense(2)
        self.lstm.build((None, shape[1], 6))
        self.last.build((None, 4))

    def call(self, x):  # (rows, time, roads, numbers)
        rows, time, roads, _ = x.shape
        by_road = ops.transpose(x, (2, 0, 1, 3))
        near = ops.segment_sum(ops.take(by_road, self.pairs[1], axis=0), self.pairs[0], roads)
        found = ops.concatenate([ops.matmul(by_road, self.kernel), ops.matmul(near, self.kernel)], axis=-1)
        merged = ops.reshape(found, (roads * rows, time, -1))
        out = ops.reshape(self.last(self.lstm(ops.relu(merged))), (roads, rows, 2))
        return ops.transpose(out, (1, 2, 0))


def traffic(noise):
    inputs = keras.Input((6, 5, 1))
    return compiled(keras.Model(inputs, RoadGraph()(inputs)))


def frames(noise):
    inner = [layers.ConvLSTM2D(3, 3, padding="same", return_sequences=True), noise.normalization()]
    inner += [layers.ConvLSTM2D(3, 1, padding="same", return_sequences=True)]
    last = layers.Conv3D(1, 3, activation="sigmoid", padding="same")
    return compiled(keras.Sequential([keras.Input((4, 6, 6, 1)), *inner, last]), "binary_crossentropy")


def of(*shape, to, whole=0):
    def data(rng):
        y = rng.integers(0, whole, (ROWS, *to)) if whole else rng.random((ROWS, *to), "float32")
        return {"x": rng.random((ROWS, *shape), "float32"), "y": y}

    return data


def binary(rng):
    return words(rng) | {"y": rng.integers(0, 2, (ROWS, 1)).astype("float32")}


PROGRAMS = [
    Program("text_classification_from_scratch", "text", text_convolutions, binary, has_noise=True),
    Program("bidirectional_lstm_imdb", "text", bidirectional_lstm, binary),
    Program("text_classification_with_transformer", "text", text_transformer, words, has_noise=True),
    Program("text_generation_with_miniature_gpt", "text", miniature_gpt, next_words, has_noise=True),
    Program("fnet_classification", "text", fourier_net, words, has_noise=True),
    Program("text_classification_with_switch_transformer", "text", switch_transformer, words, global_batch="works along the rows"),
    Program("lstm_seq2seq", "text", sequence_to_sequence, pairs),
    Program("addition_rnn", "text", addition, sums),
    Program("ner_transformers", "text", named_entities, tags, has_noise=True),
    Program("masked_language_modeling", "text", lambda noise: compiled(MaskedLanguage(noise), None), hidden_words, fit_only=True),
    Program("ctc_asr", "audio", speech, utterances, has_noise=True),
    Program("speaker_recognition_using_cnn", "audio", speaker, of(32, to=(), whole=3)),
    Program("timeseries_classification_from_scratch", "series", series_convolutions, of(16, 1, to=(), whole=2), has_noise=True),
    Program("timeseries_classification_transformer", "series", series_transformer, of(16, 1, to=(), whole=2), has_noise=True),
    Program("timeseries_anomaly_detection", "series", anomalies, of(16, 1, to=(16, 1)), has_noise=True),
    Program("timeseries_weather_forecasting", "series", weather, of(12, 5, to=(1,))),
    Program("timeseries_traffic_forecasting", "series", traffic, of(6, 5, 1, to=(2, 5))),
    Program("conv_lstm", "series", frames, of(4, 6, 6, 1, to=(4, 6, 6, 1)), has_noise=True),
]  # fmt: skip
