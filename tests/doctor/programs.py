"""Small programs that train wrongly or slowly without an error, each beside a near-by one that is right."""

import keras
import numpy as np
from keras import layers, losses

ROWS, CLASSES = 96, 3


def data(seed=0):
    """Points of three clouds, ``(96, 2)``, and their numbers."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, ROWS)
    centres = np.array([[2.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]])
    return (centres[y] + 0.3 * rng.normal(size=(ROWS, 2))).astype("float32"), y


X, Y = data()
ONE_HOT = keras.utils.to_categorical(Y, CLASSES)
IS_FIRST = (Y == 0).astype("float32")[:, None]
FROM_LOGITS = losses.SparseCategoricalCrossentropy(from_logits=True)
SPARSE = "sparse_categorical_crossentropy"


def with_values(array, row, value):
    array = np.array(array)
    array[row] = value
    return array


def net(*last, loss, optimizer="sgd", **options):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(4, "tanh"), *last])
    model.compile(optimizer, loss, **options)
    return model


def dense(activation=None, units=CLASSES, **options):
    return layers.Dense(units, activation, **options)


def padded_steps(*axes):
    """Labels of time steps, of which the last has a class of its own and no weight; the weights may have further ``axes``."""
    model = keras.Sequential([keras.Input((5, 2)), dense()])
    model.compile("sgd", FROM_LOGITS)
    labels = np.tile([0, 1, 0, 1, 255], (ROWS, 1))
    return model, (np.ones((ROWS, 5, 2)), labels, (labels != 255).reshape(*labels.shape, *axes))


class OwnMasking(layers.Layer):
    """Masks time steps of -9, as keras.layers.Masking(-9) does."""

    def call(self, x):
        return x

    def compute_mask(self, x, mask=None):
        return keras.ops.any(keras.ops.not_equal(x, -9.0), -1)


def with_unused_input(kind, bad=1):
    """Two inputs in a dict or a list, of which the outputs depend on the first only; one has NaN."""
    inputs = [keras.Input((2,), name=name) for name in ("a", "b")]
    values = [with_values(X, 7, np.nan) if number == bad else X for number in range(2)]
    if kind is dict:
        inputs, values = dict(zip("ab", inputs, strict=True)), dict(zip("ab", values, strict=True))
    model = keras.Model(inputs, dense()(inputs["a" if kind is dict else 0]))
    model.compile("sgd", FROM_LOGITS)
    return model, (values, Y)


def steps_with_a_mask(labels):
    """Labels of time steps, of which an input leaves out the last two."""
    steps, mask = keras.Input((5, 2)), keras.Input((5,), dtype="bool")
    model = keras.Model([steps, mask], dense()(layers.SimpleRNN(4, return_sequences=True)(steps, mask=mask)))
    model.compile("sgd", FROM_LOGITS)
    masks = np.tile([True, True, True, False, False], (ROWS, 1))
    return model, ([np.ones((ROWS, 5, 2)), masks], np.tile(labels, (ROWS, 1)))


def of_any_size(labels):
    """A convolution over images of any size, and ``labels`` classes in its targets."""
    model = keras.Sequential([keras.Input((None, None, 2)), layers.Conv2D(CLASSES, 1)])
    model.compile("sgd", FROM_LOGITS)
    pixels = np.random.default_rng(0).integers(0, labels, (ROWS, 4, 4))
    return model, (np.ones((ROWS, 4, 4, 2)), pixels)


def masked_steps(labels, masking=None):
    """Binary labels of time steps, of which the last are masked."""
    model = keras.Sequential(
        [
            keras.Input((5, 2)),
            masking or layers.Masking(-9.0),
            layers.LSTM(4, return_sequences=True),
            dense("sigmoid", 1),
        ]
    )
    model.compile("sgd", "binary_crossentropy")
    inputs = np.random.default_rng(0).normal(size=(ROWS, 5, 2))
    inputs[:, 3:] = -9.0
    return model, (inputs, np.tile(labels, (ROWS, 1))[..., None])


def two_outputs(first, second, loss):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, {"a": first(inputs), "b": second(inputs)})
    model.compile("sgd", loss)
    return model


def nested(activation, loss):
    inner = keras.Sequential([keras.Input((2,)), dense(activation)])
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layers.Activation("linear", dtype="float32")(layers.Reshape((CLASSES,))(inner(inputs))))
    model.compile("sgd", loss)
    return model


class OwnStep(keras.Sequential):
    """Its train_step may do what it likes with the outputs."""

    def train_step(self, state, batch):
        return super().train_step(state, batch)


class Scaled(layers.Layer):
    """Brings probabilities back to logits."""

    def call(self, x):
        return keras.ops.log(x + 1e-6)


class OwnDense(layers.Dense):
    """Somebody's own: its outputs are probabilities."""

    def call(self, x):
        return keras.ops.softmax(super().call(x))


def own_step(loss):
    model = OwnStep([keras.Input((2,)), dense("softmax")])
    model.compile("sgd", loss)
    return model


def mixture():
    """A mixture of probabilities is one, though its layer is linear."""
    model = keras.Sequential([keras.Input((2,)), dense("softmax")])
    model.add(dense(use_bias=False, kernel_constraint="non_neg", kernel_initializer="ones"))
    model.compile("sgd", SPARSE)
    return model


def on_steps(last, loss):
    model = keras.Sequential([keras.Input((5, 2)), layers.TimeDistributed(last)])
    model.compile("sgd", loss)
    return model


def with_bias(value):
    """A softmax over numbers to which others, of which the last are ``value``, have been added: a mask, if it is -inf."""
    inputs, bias = keras.Input((2,)), keras.Input((CLASSES,))
    model = keras.Model([inputs, bias], layers.Softmax()(layers.Add()([dense()(inputs), bias])))
    model.compile("sgd", "mse")
    return model, ([X, np.tile([0, 0, value], (ROWS, 1)).astype("float32")], ONE_HOT)


def one_of_two_inputs(wrong):
    """A model that takes "a" and "b", and inputs of which one has NaN."""
    taken = {name: keras.Input((2,), name=name) for name in "ab"}
    model = keras.Model(taken, dense()(layers.Concatenate()(list(taken.values()))))
    model.compile("sgd", FROM_LOGITS)
    return model, ({name: with_values(X, 7, np.nan) if name == wrong else X for name in "abc"}, Y)


def cropped_steps():
    """Time steps of which the first are cut off."""
    model = keras.Sequential([keras.Input((5, 2)), layers.Cropping1D((2, 0)), layers.Flatten(), dense()])
    model.compile("sgd", FROM_LOGITS)
    return model, (with_values(STEPS[0], (slice(None), slice(0, 2)), np.nan), Y)


def on_columns(*hidden):
    """Binary targets of as many columns as there are classes, from steps of one number."""
    inputs = output = keras.Input((CLASSES, 1))
    for layer in hidden:
        output = layer(output)
    model = keras.Model(inputs, output)
    model.compile("sgd", "binary_crossentropy")
    return model, (np.ones((ROWS, CLASSES, 1)), ONE_HOT[..., None])


class Evaluated(layers.Layer):
    """Calls a layer with training=False, which holds in a call method."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x, training=False)


def without_training(layer, x=X, is_nested=False):
    """A functional model that calls ``layer`` with training=False."""
    inputs = keras.Input(x.shape[1:])
    hidden = layer(inputs) if isinstance(layer, Evaluated) else layer(inputs, training=False)
    hidden = keras.Model(inputs, hidden)(inputs) if is_nested else hidden
    model = keras.Model(inputs, dense()(layers.Flatten()(hidden)))
    model.compile("sgd", FROM_LOGITS)
    return model, (x, Y)


def stateful():
    """Keeps a state for each row of its batch, here one, and so runs on the global batch."""
    model = keras.Sequential([keras.Input(batch_shape=(1, 1, 2)), layers.LSTM(4, stateful=True), dense()])
    model.compile("sgd", FROM_LOGITS)
    return model, (X[:, None], Y, None, 1)


class WithArguments(layers.Dropout):
    """Takes what it is given as keywords, of which Keras notes only those that are given."""

    def call(self, x, **arguments):
        return super().call(x, **arguments)


def with_dropout(dropout):
    """A functional model that calls a dropout as usual: Keras notes training=False, the default of its call method."""
    inputs = keras.Input(X.shape[1:])
    model = keras.Model(inputs, dense()(dropout(inputs)))
    model.compile("sgd", FROM_LOGITS)
    return model, (X, Y)


STEPS = np.repeat(X[:, None], 5, 1), np.repeat(Y[:, None], 5, 1)
BINARY = losses.BinaryCrossentropy(from_logits=True)
MASKED = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)

# name of the finding: programs that have it, and programs that do not; each gives a model and what fit gets.
PROGRAMS = {
    "softmax-from-logits": (
        [
            lambda: (net(dense("softmax"), loss=FROM_LOGITS), (X, Y)),
            lambda: (net(dense(), layers.Softmax(), loss=FROM_LOGITS), (X, Y)),
            lambda: (net(dense(), layers.Activation("softmax"), loss=FROM_LOGITS), (X, Y)),
            lambda: (net(dense(keras.ops.softmax), loss=FROM_LOGITS), (X, Y)),
            lambda: (nested("softmax", FROM_LOGITS), (X, Y)),
            lambda: (on_steps(dense("softmax"), FROM_LOGITS), STEPS),
            lambda: (net(dense("sigmoid", 1), loss=BINARY), (X, IS_FIRST)),
            lambda: (
                two_outputs(
                    dense("softmax"), lambda x: keras.ops.sigmoid(dense(None, 1)(x)), {"a": SPARSE, "b": BINARY}
                ),
                (X, {"a": Y, "b": IS_FIRST}),
            ),
            lambda: (net(dense("softmax"), loss=losses.CategoricalFocalCrossentropy(from_logits=True)), (X, ONE_HOT)),
        ],
        [
            lambda: (net(dense(), loss=FROM_LOGITS), (X, Y)),
            lambda: (net(dense("softmax"), Scaled(), loss=FROM_LOGITS), (X, Y)),
            lambda: (net(dense("softmax"), layers.Rescaling(8.0), loss=FROM_LOGITS), (X, Y)),
            lambda: (net(dense("softmax"), dense(), loss=FROM_LOGITS), (X, Y)),
            lambda: (own_step(FROM_LOGITS), (X, Y)),
            lambda: (
                two_outputs(dense("softmax"), dense(None, 1), {"a": SPARSE, "b": BINARY}),
                (X, {"a": Y, "b": IS_FIRST}),
            ),
        ],
    ),
    "logits-as-probabilities": (
        [
            lambda: (net(dense(), loss=SPARSE), (X, Y)),
            lambda: (net(dense(), loss=losses.sparse_categorical_crossentropy), (X, Y)),
            lambda: (nested(None, SPARSE), (X, Y)),
            lambda: (on_steps(dense(), SPARSE), STEPS),
            lambda: (net(dense(None, 1), loss="binary_crossentropy"), (X, IS_FIRST)),
            lambda: (two_outputs(dense(), dense(), SPARSE), (X, {"a": Y, "b": Y})),
        ],
        [
            lambda: (net(dense("softmax"), loss=SPARSE), (X, Y)),
            lambda: (net(dense("exponential"), loss=SPARSE), (X, Y)),
            lambda: (net(OwnDense(CLASSES), loss=SPARSE), (X, Y)),
            lambda: (net(dense(None, 1), loss="mse"), (X, IS_FIRST)),
            lambda: (mixture(), (X, Y)),
        ],
    ),
    "softmax-of-one": (
        [
            lambda: (net(dense("softmax", 1), loss="binary_crossentropy"), (X, IS_FIRST)),
            lambda: (
                net(dense(None, 1), layers.Softmax(), layers.Flatten(), loss="binary_crossentropy"),
                (X, IS_FIRST),
            ),
            lambda: on_columns(layers.Dense(1), layers.Softmax(2)),
        ],
        [
            lambda: (net(dense("sigmoid", 1), loss="binary_crossentropy"), (X, IS_FIRST)),
            lambda: on_columns(layers.Dense(1), layers.Softmax(1)),
            lambda: on_columns(layers.Dense(1), layers.Softmax((1, 2))),
            lambda: on_columns(layers.Dense(1), lambda x: keras.ops.softmax(x, axis=1)),
            lambda: on_columns(layers.Flatten(), dense("softmax"), layers.Reshape((CLASSES, 1))),
        ],
    ),
    "labels-out-of-range": (
        [
            lambda: (net(dense(), loss=FROM_LOGITS), (X, Y + 1)),
            lambda: (net(dense(), loss=FROM_LOGITS), (X, with_values(Y, 90, -1))),
            lambda: (net(dense(), loss=FROM_LOGITS), (X, Y + 0.5)),
            lambda: (net(dense(None, 1), loss=BINARY), (X, 2 * IS_FIRST - 1)),
            lambda: (net(dense(), loss=MASKED), (X, with_values(Y, 3, -2))),
            lambda: (net(dense(None, 1), loss=BINARY), (X, 1.0001 * IS_FIRST)),
            lambda: of_any_size(labels=4),
            lambda: (net(dense(), loss=FROM_LOGITS), (X, with_values(Y, 90, 255), None, None, {0: 0.0, 254: 0.0})),
        ],
        [
            lambda: (net(dense(), loss=FROM_LOGITS), (X, Y.astype("float32"))),
            lambda: (net(dense(), loss=MASKED), (X, with_values(Y, 3, -1))),
            lambda: (net(dense(), loss=FROM_LOGITS), (X, with_values(Y, 90, -1), with_values(np.ones(ROWS), 90, 0))),
            padded_steps,
            lambda: padded_steps(1),
            lambda: masked_steps([0, 1, 0, -1, -1]),
            lambda: masked_steps([0, 1, 0, -1, -1], OwnMasking()),
            lambda: steps_with_a_mask([0, 1, 0, -1, -1]),
            lambda: (net(dense(None, 1), loss=BINARY), (X, np.nextafter(np.float32(1), np.float32(2)) * IS_FIRST)),
            lambda: of_any_size(labels=3),
            lambda: (net(dense(), loss=FROM_LOGITS), (X, with_values(Y, 90, 255), None, None, {0: 2.0, 255: 0.0})),
            lambda: (net(dense(None, 1), loss=BINARY), (X, 0.1 + 0.8 * IS_FIRST)),
            lambda: (net(dense(None, 1), loss="hinge"), (X, 2 * IS_FIRST - 1)),
        ],
    ),
    "labels-not-finite": (
        [
            lambda: (net(dense(None, 1), loss=BINARY), (X, with_values(IS_FIRST, 7, np.nan))),
            lambda: (net(dense(), loss=FROM_LOGITS), (X, with_values(Y.astype("float32"), 7, np.nan))),
            lambda: (
                net(dense(None, 1), loss=BINARY),
                (X, with_values(IS_FIRST, 7, np.nan), with_values(np.ones(ROWS), 7, 0)),
            ),
        ],
        [
            lambda: (net(dense(None, 1), loss=BINARY), (X, IS_FIRST)),
            lambda: (
                net(dense(), loss=FROM_LOGITS),
                (X, with_values(Y.astype("float32"), 7, np.nan), with_values(np.ones(ROWS), 7, 0)),
            ),
        ],
    ),
    "sample-weights-not-finite": (
        [
            lambda: (net(dense(), loss=FROM_LOGITS), (X, Y, with_values(np.ones(ROWS), 7, np.nan))),
            lambda: (net(dense(), loss="mse"), (X, ONE_HOT, with_values(np.ones(ROWS), 7, np.inf))),
        ],
        [
            lambda: (net(dense(), loss=FROM_LOGITS), (X, Y, np.ones(ROWS))),
            lambda: (own_step(SPARSE), (X, Y, with_values(np.ones(ROWS), 7, np.nan))),
        ],
    ),
    "inputs-not-finite": (
        [
            lambda: (net(dense(), loss=FROM_LOGITS), (with_values(X, 7, np.nan), Y)),
            lambda: (net(dense("softmax"), loss=SPARSE), (with_values(X, 7, -np.inf), Y)),
            lambda: with_bias(np.inf),
            lambda: one_of_two_inputs("a"),
            lambda: with_unused_input(list, bad=0),
        ],
        [
            lambda: (
                net(layers.Lambda(keras.ops.nan_to_num), dense(), loss=FROM_LOGITS),
                (with_values(X, 7, np.nan), Y),
            ),
            lambda: with_bias(-np.inf),
            lambda: one_of_two_inputs("c"),
            lambda: with_unused_input(dict),
            lambda: with_unused_input(list),
            cropped_steps,
        ],
    ),
    "fewer-rows-than-replicas": (
        [lambda: (net(dense(), loss=FROM_LOGITS), (X, Y, None, 1))],
        [lambda: (net(dense(), loss=FROM_LOGITS), (X, Y, None, 2)), stateful],
    ),
    "normalization-of-few-rows": (
        [lambda: (net(layers.BatchNormalization(), dense(), loss=FROM_LOGITS), (X, Y, None, 12))],
        [
            lambda: (net(layers.BatchNormalization(), dense(), loss=FROM_LOGITS), (X, Y, None, 16)),
            lambda: (net(layers.BatchNormalization(synchronized=True), dense(), loss=FROM_LOGITS), (X, Y, None, 12)),
            lambda: (net(layers.BatchNormalization(trainable=False), dense(), loss=FROM_LOGITS), (X, Y, None, 12)),
        ],
    ),
    "training-argument-ignored": (
        [
            lambda: without_training(layers.BatchNormalization()),
            lambda: without_training(keras.Sequential([layers.Dense(4), layers.Dropout(0.3)])),
            lambda: without_training(layers.BatchNormalization(), is_nested=True),
            lambda: without_training(WithArguments(0.3)),
        ],
        [
            lambda: with_dropout(layers.Dropout(0.3)),
            lambda: with_dropout(layers.GaussianDropout(0.3)),
            lambda: without_training(layers.BatchNormalization(trainable=False)),
            lambda: without_training(layers.Dropout(0.0)),
            lambda: without_training(layers.LSTM(4, return_sequences=True), X[:, None]),
            lambda: without_training(Evaluated(layers.Dropout(0.3))),
        ],
    ),
    "float16-without-loss-scale": (
        [
            lambda: (half(auto_scale_loss=False), (X, Y)),
            lambda: (net(dense(dtype="mixed_float16"), loss=FROM_LOGITS), (X, Y)),
        ],
        [
            lambda: (half(), (X, Y)),
            lambda: (half(optimizer=keras.optimizers.SGD(loss_scale_factor=128.0), auto_scale_loss=False), (X, Y)),
            lambda: (net(dense(dtype="mixed_bfloat16"), loss=FROM_LOGITS), (X, Y)),
        ],
    ),
}
# Keras stops at the shapes of these, so what they do is not trained.
REFUSED = {
    "one-hot-labels": (
        lambda: (net(dense("softmax"), loss=SPARSE), (X, ONE_HOT)),
        lambda: (net(dense("softmax"), loss=SPARSE), (X, Y[:, None])),
    ),
    "labels-not-one-hot": (
        lambda: (net(dense("softmax"), loss="categorical_crossentropy"), (X, Y)),
        lambda: (net(dense("softmax"), loss="categorical_crossentropy"), (X, ONE_HOT)),
    ),
}


def half(optimizer="sgd", **options):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return net(dense(), loss=FROM_LOGITS, optimizer=optimizer, **options)
    finally:
        keras.config.set_dtype_policy(before)
