"""The proof classifies every layer and every model of Keras: row-wise, or mixing rows."""

import inspect

import jax
import jax.numpy as jnp
import keras
import pytest
from keras import layers

from lockstep.execution.rowwise.row_axes import Mixed
from tests.support.marks import quick_first

from .following import dependences_of_function, dependences_of_model, is_by_rows

SERIES, PICTURE, VOLUME, WORDS = (6, 4), (8, 8, 3), (6, 6, 6, 2), (5,)
BY_ROWS = [
    *(
        (layers.Activation("relu"), SERIES),
        (layers.ActivityRegularization(0.1), SERIES),
        (layers.AlphaDropout(0.2), SERIES),
    ),
    *((kind(2), SERIES) for kind in (layers.AdaptiveAveragePooling1D, layers.AdaptiveMaxPooling1D)),
    *((kind(2), PICTURE) for kind in (layers.AdaptiveAveragePooling2D, layers.AdaptiveMaxPooling2D)),
    *((kind(2), VOLUME) for kind in (layers.AdaptiveAveragePooling3D, layers.AdaptiveMaxPooling3D)),
    *((kind(2), SERIES) for kind in (layers.AveragePooling1D, layers.MaxPooling1D)),
    *((kind(2), PICTURE) for kind in (layers.AveragePooling2D, layers.MaxPooling2D)),
    *((kind(2), VOLUME) for kind in (layers.AveragePooling3D, layers.MaxPooling3D)),
    *(
        (layers.GlobalAveragePooling1D(), SERIES),
        (layers.GlobalAveragePooling2D(), PICTURE),
        (layers.GlobalAveragePooling3D(), VOLUME),
    ),
    *(
        (layers.GlobalMaxPooling1D(), SERIES),
        (layers.GlobalMaxPooling2D(), PICTURE),
        (layers.GlobalMaxPooling3D(), VOLUME),
    ),
    (layers.AutoContrast(), PICTURE),
    (layers.BatchNormalization(), SERIES),
    *((layers.Bidirectional(layers.LSTM(3)), SERIES), (layers.CenterCrop(4, 4), PICTURE)),
    *((kind(2, 3), SERIES) for kind in (layers.Conv1D, layers.Conv1DTranspose, layers.SeparableConv1D)),
    *((kind(2, 3), PICTURE) for kind in (layers.Conv2D, layers.Conv2DTranspose, layers.SeparableConv2D)),
    *((kind(2, 3), VOLUME) for kind in (layers.Conv3D, layers.Conv3DTranspose)),
    *((layers.DepthwiseConv1D(3), SERIES), (layers.DepthwiseConv2D(3), PICTURE)),
    *(
        (layers.ConvLSTM1D(2, 3), (3, *SERIES)),
        (layers.ConvLSTM2D(2, 3), (3, *PICTURE)),
        (layers.ConvLSTM3D(2, 3), (2, *VOLUME)),
    ),
    *((layers.Cropping1D(), SERIES), (layers.Cropping2D(), PICTURE), (layers.Cropping3D(), VOLUME)),
    *(
        (layers.Dense(3), SERIES),
        (layers.Discretization([0.1, 0.5]), SERIES),
        (layers.Dropout(0.2), SERIES),
        (layers.ELU(), SERIES),
    ),
    *(
        (layers.EinsumDense("abc,cd->abd", (None, 3)), SERIES),
        (layers.Embedding(9, 3), WORDS),
        (layers.Flatten(), PICTURE),
    ),
    *((layers.GRU(3), SERIES), (layers.LSTM(3, return_sequences=True), SERIES), (layers.SimpleRNN(3), SERIES)),
    *((layers.RNN(cell), SERIES) for cell in (layers.GRUCell(3), layers.LSTMCell(3), layers.SimpleRNNCell(3))),
    (layers.RNN(layers.StackedRNNCells([layers.GRUCell(3), layers.LSTMCell(3)])), SERIES),
    *(
        (layers.GaussianDropout(0.2), SERIES),
        (layers.GaussianNoise(0.2), SERIES),
        (layers.GroupNormalization(2), SERIES),
    ),
    *((layers.Identity(), SERIES), (layers.Lambda(lambda x: 2 * x), SERIES), (layers.LayerNormalization(), SERIES)),
    *((layers.LeakyReLU(), SERIES), (layers.Masking(), SERIES)),
    *(
        (layers.Normalization(mean=1.0, variance=2.0), SERIES),
        (layers.PReLU(), SERIES),
        (layers.Permute((2, 1)), SERIES),
    ),
    (layers.Pipeline([layers.Rescaling(2.0)]), PICTURE),
    *(
        (kind(0.2), PICTURE)
        for kind in (layers.RandomBrightness, layers.RandomColorDegeneration, layers.RandomContrast)
    ),
    (layers.RandomColorJitter((0, 1), 0.1, 0.1, 0.1, 0.1), PICTURE),
    *((kind(), PICTURE) for kind in (layers.RandomErasing, layers.RandomFlip, layers.RandomGaussianBlur)),
    *((kind(), PICTURE) for kind in (layers.RandomGrayscale, layers.RandomInvert, layers.RandomPerspective)),
    *(
        (layers.RandomHue(0.2), PICTURE),
        (layers.RandomPosterization(4), PICTURE),
        (layers.RandomRotation(0.2), PICTURE),
    ),
    *(
        (layers.RandomSaturation(0.2), PICTURE),
        (layers.RandomSharpness(0.2), PICTURE),
        (layers.RandomShear(0.2, 0.2), PICTURE),
    ),
    *((layers.RandomTranslation(0.2, 0.2), PICTURE), (layers.RandomZoom(0.2), PICTURE), (layers.ReLU(), SERIES)),
    *((layers.RMSNormalization(), SERIES), (layers.RepeatVector(3), (4,)), (layers.Rescaling(2.0), SERIES)),
    *((layers.Reshape((12, 2)), SERIES), (layers.Resizing(5, 5), PICTURE), (layers.ReversibleEmbedding(9, 3), WORDS)),
    *((layers.STFTSpectrogram(frame_length=64, frame_step=32, fft_length=64), (400, 1)), (layers.Softmax(), SERIES)),
    *(
        (layers.Solarization(), PICTURE),
        (layers.SpatialDropout1D(0.2), SERIES),
        (layers.SpatialDropout2D(0.2), PICTURE),
    ),
    *((layers.SpatialDropout3D(0.2), VOLUME), (layers.SpectralNormalization(layers.Dense(3)), SERIES)),
    *(
        (layers.TimeDistributed(layers.Dense(3)), SERIES),
        (layers.UnitNormalization(), SERIES),
        (layers.UpSampling1D(), SERIES),
    ),
    *(
        (layers.UpSampling2D(interpolation="bilinear"), PICTURE),
        (layers.UpSampling3D(), VOLUME),
        (layers.ZeroPadding1D(), SERIES),
    ),
    *((layers.ZeroPadding2D(), PICTURE), (layers.ZeroPadding3D(), VOLUME)),
    *((layers.CategoryEncoding(9, output_mode=mode), WORDS) for mode in ("multi_hot", "count")),
]
OF_TWO = [
    *(
        layers.Add(),
        layers.Average(),
        layers.Concatenate(),
        layers.Dot(2),
        layers.Maximum(),
        layers.Minimum(),
        layers.Multiply(),
    ),
    *(layers.Subtract(), layers.Attention(), layers.AdditiveAttention(), layers.MultiHeadAttention(2, 3)),
    layers.GroupQueryAttention(2, 2, 1),
]
MIX = [
    (layers.MelSpectrogram(sampling_rate=4000), (4000,)),  # cuts at so many decibels below the loudest of the batch
    (layers.ContrastLimitedAdaptiveHistogramEqualization(value_range=(0, 1)), PICTURE),  # looks rows up by their number
    (layers.MixUp(), PICTURE),
    (layers.CutMix(), PICTURE),
    (layers.AugMix(), PICTURE),
    (layers.RandAugment(), PICTURE),
]
# Abstract layers, layers that are no function of arrays under JAX, and layers that JAX cannot trace in fit either.
OTHERS = {
    "FlaxLayer",
    "HashedCrossing",
    "Hashing",
    "InputLayer",
    "InputSpec",
    "IntegerLookup",
    "Layer",
    "StringLookup",
    "TFSMLayer",
}
OTHERS |= {
    "TextVectorization",
    "TorchModuleWrapper",
    "JaxLayer",
    "Wrapper",
    "RandomCrop",
    "RandomElasticTransform",
    "MaxNumBoundingBoxes",
}
OTHERS |= {"GRUCell", "LSTMCell", "SimpleRNNCell", "StackedRNNCells"}


def batch_of(shape):
    if shape == WORDS:
        return jax.random.randint(jax.random.key(0), (6, *shape), 0, 9)
    return jax.random.uniform(jax.random.key(0), (6, *shape))


def model_of(layer, *shapes):
    dtype = "int32" if shapes[0] == WORDS else "float32"
    inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
    if isinstance(layer, (layers.MultiHeadAttention, layers.GroupQueryAttention)):
        return keras.Model(inputs, layer(*inputs))
    return keras.Model(inputs, layer(inputs if len(inputs) > 1 else inputs[0]))


@pytest.mark.parametrize(("layer", "shape"), BY_ROWS, ids=lambda one: getattr(one, "name", ""))
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_treats_each_row_by_itself(layer, shape, training):
    outputs, *losses = dependences_of_model(model_of(layer, shape), batch_of(shape), training=training)
    assert is_by_rows(outputs), outputs
    assert not any(isinstance(loss, Mixed) for loss in losses)


@pytest.mark.parametrize("layer", OF_TWO, ids=lambda layer: layer.name)
def test_a_layer_of_two_inputs_treats_each_row_by_itself(layer):
    model = model_of(layer, SERIES, SERIES)
    places = dependences_of_model(model, [batch_of(SERIES), batch_of(SERIES)], training=True)
    assert all(map(is_by_rows, places)), places


@pytest.mark.parametrize(("layer", "shape"), MIX, ids=lambda one: getattr(one, "name", ""))
def test_a_layer_that_mixes_rows_is_named(layer, shape):
    (place,) = dependences_of_model(model_of(layer, shape), batch_of(shape), training=True)
    assert isinstance(place, Mixed)
    assert layer.name in str(place) or isinstance(layer, layers.AugMix)  # Another program for each number of rows.


@pytest.mark.slow
def test_equalization_mixes_rows():
    """One histogram for all rows; Keras (3.15) builds no functional model with it."""
    (place,) = dependences_of_function(layers.Equalization(value_range=(0, 1)).call, batch_of(PICTURE))
    assert isinstance(place, Mixed)


def test_no_layer_of_keras_is_left_out():
    classes = {kind for _, kind in inspect.getmembers(layers, inspect.isclass) if kind.__name__ not in OTHERS}
    known = {type(layer) for layer, *_ in (*BY_ROWS, *MIX)} | {type(layer) for layer in OF_TWO} | {layers.Equalization}
    assert {kind.__name__ for kind in classes - known} == set()


# One model every day, as the tests above have all layers; it has the operations of MobileNetV2, too.
SMALL = ("MobileNetV3Small",)
APPLICATIONS = [
    pytest.param(name, marks=[] if name in SMALL else [pytest.mark.nightly])
    for name, build in inspect.getmembers(keras.applications, inspect.isfunction)
]


@pytest.mark.parametrize("name", quick_first(APPLICATIONS))
def test_a_model_of_keras_treats_each_row_by_itself(name):
    model = getattr(keras.applications, name)(weights=None, classes=5)
    shape = model.input_shape[1:] if None not in model.input_shape[1:] else (224, 224, 3)
    places = dependences_of_model(model, jax.ShapeDtypeStruct((6, *shape), jnp.float32), training=True)
    assert all(map(is_by_rows, places)), places
