"""Pictures: classification, segmentation, restoration, learning by comparison."""

import keras
from keras import layers, ops

from .kit import ROWS, OwnStep, Program, compiled, logits, own


def pictures(rng, size=12, classes=4):
    return {"x": rng.random((ROWS, size, size, 3), "float32"), "y": rng.integers(0, classes, ROWS)}


def convolutional_net(noise):
    inner = [layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Conv2D(8, 3, activation="relu")]
    model = keras.Sequential([keras.Input((12, 12, 3)), *inner, layers.Flatten(), noise.dropout(), layers.Dense(4)])
    return compiled(model, logits(), ["accuracy"])


def small_xception(noise):
    inputs = keras.Input((12, 12, 3))
    x = previous = layers.Activation("relu")(
        noise.normalization()(layers.Conv2D(6, 3, strides=2, padding="same")(inputs))
    )
    for size in (6, 8):
        x = noise.normalization()(layers.SeparableConv2D(size, 3, padding="same")(layers.Activation("relu")(x)))
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        x = previous = layers.add([x, layers.Conv2D(size, 1, strides=2, padding="same")(previous)])
    x = noise.dropout()(layers.GlobalAveragePooling2D()(x))
    return compiled(keras.Model(inputs, layers.Dense(4)(x)), logits(), ["accuracy"])


class Patches(layers.Layer):
    """Cuts pictures into squares: ``(rows, squares, numbers)``."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def call(self, images):
        height, width, channels = images.shape[1:]
        patches = ops.image.extract_patches(images, self.size)
        return ops.reshape(patches, (-1, (height // self.size) * (width // self.size), self.size**2 * channels))


class Positions(layers.Layer):
    """Adds what is learned for each position."""

    def build(self, shape):
        self.embed = layers.Embedding(shape[1], shape[2])
        self.embed.build(())

    def call(self, x):
        return x + self.embed(ops.arange(x.shape[1]))


def vision_transformer(noise):
    inputs = keras.Input((12, 12, 3))
    x = Positions()(layers.Dense(8)(Patches(4)(inputs)))
    for _ in range(2):
        normal = layers.LayerNormalization(epsilon=1e-6)(x)
        x = x + layers.MultiHeadAttention(2, 4, dropout=noise.rate / 2)(normal, normal)
        x = x + noise.dropout(0.5)(layers.Dense(8, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x)))
    x = noise.dropout()(layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x)))
    return compiled(keras.Model(inputs, layers.Dense(4)(x)), logits(), ["accuracy"])


def mlp_mixer(noise):
    inputs = keras.Input((12, 12, 3))
    x = layers.Dense(8)(Patches(4)(inputs))
    for _ in range(2):
        across = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        x = x + layers.Permute((2, 1))(layers.Dense(9)(noise.dropout(0.5)(layers.Dense(9, activation="gelu")(across))))
        x = x + layers.Dense(8, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.GlobalAveragePooling1D()(x)
    return compiled(keras.Model(inputs, layers.Dense(4)(noise.dropout()(x))), logits(), ["accuracy"])


def convolution_mixer(noise):
    inputs = keras.Input((12, 12, 3))
    x = noise.normalization()(layers.Activation("gelu")(layers.Conv2D(6, 2, strides=2)(layers.Rescaling(2.0)(inputs))))
    for _ in range(2):
        x = x + noise.normalization()(layers.Activation("gelu")(layers.DepthwiseConv2D(3, padding="same")(x)))
        x = noise.normalization()(layers.Activation("gelu")(layers.Conv2D(6, 1)(x)))
    return compiled(keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x))), logits())


def u_net(noise):
    inputs = keras.Input((12, 12, 3))
    one = noise.normalization()(layers.Conv2D(4, 3, padding="same", activation="relu")(inputs))
    two = layers.Conv2D(6, 3, padding="same", activation="relu")(layers.MaxPooling2D()(one))
    up = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(two)
    outputs = layers.Conv2D(3, 1)(layers.concatenate([layers.UpSampling2D()(two), up, one]))
    return compiled(keras.Model(inputs, outputs), logits(), ["accuracy"])


def super_resolution(noise):
    inputs = keras.Input((6, 6, 1))
    x = layers.Conv2D(8, 5, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(4, 3, padding="same")(x)  # Each four numbers become a square of pixels.
    x = layers.Reshape((6, 6, 2, 2))(x)
    outputs = layers.Reshape((12, 12, 1))(layers.Permute((1, 3, 2, 4))(x))
    return compiled(keras.Model(inputs, outputs))


def attention_over_instances(noise):
    """Several pictures are one row; the weights of each come from a softmax over those of its row."""
    inputs = [keras.Input((10,)) for _ in range(3)]
    hidden = layers.Dense(6, activation="relu")
    found = [hidden(one) for one in inputs]
    scores = [layers.Dense(1)(layers.Dense(4, activation="tanh")(one)) for one in found]
    weights = layers.Softmax()(layers.concatenate(scores))
    weighted = [one * weights[:, number : number + 1] for number, one in enumerate(found)]
    return compiled(keras.Model(inputs, layers.Dense(2)(layers.concatenate(weighted))), logits())


class SpatialTransformer(layers.Layer):
    """Samples each picture on a grid that it has chosen itself."""

    def build(self, shape):
        self.place = layers.Dense(2, kernel_initializer="zeros")
        self.place.build((shape[0], shape[1] * shape[2] * shape[3]))

    def call(self, images):
        height, width = images.shape[1:3]
        moved = self.place(ops.reshape(images, (-1, height * width * 3)))
        rows, columns = ops.meshgrid(
            ops.arange(height, dtype="float32"), ops.arange(width, dtype="float32"), indexing="ij"
        )

        def one(image, by):
            places = ops.stack([rows + by[0], columns + by[1]])
            return ops.stack([ops.image.map_coordinates(image[..., c], places, order=1) for c in range(3)], axis=-1)

        return ops.vectorized_map(lambda pair: one(*pair), (images, moved))


def spatial_transformer(noise):
    inputs = keras.Input((8, 8, 3))
    x = layers.Flatten()(layers.Conv2D(4, 3)(SpatialTransformer()(inputs)))
    return compiled(keras.Model(inputs, layers.Dense(4)(x)), logits())


class Compared(OwnStep):
    """Metric learning: anchors and positives of a batch are all compared with each other, in the loss."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.Input((8,)), layers.Dense(8, activation="relu"), layers.Dense(6), layers.UnitNormalization()]
        )
        self.built = True

    def call(self, x, training=None):
        return self.encoder(x[:, 0])

    def losses_of(self, trainable, non_trainable, data):
        anchors, positives = (self.run(self.encoder, trainable, data[0][:, number]) for number in (0, 1))
        likeness = ops.einsum("ae,pe->ap", anchors, positives) / 0.2
        loss = ops.mean(ops.sparse_categorical_crossentropy(ops.arange(len(likeness)), likeness, from_logits=True))
        return loss, {"likeness": loss}, non_trainable


class Siamese(OwnStep):
    """Three pictures of a row through one encoder, and the distances between them."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="relu"), layers.Dense(4)])
        self.built = True

    def call(self, x, training=None):
        anchor, positive, negative = (self.encoder(x[:, number]) for number in range(3))
        return ops.sum((anchor - positive) ** 2, -1), ops.sum((anchor - negative) ** 2, -1)

    def losses_of(self, trainable, non_trainable, data):
        (near, far), _ = self.stateless_call(trainable, non_trainable, data[0], training=True)
        loss = ops.mean(ops.maximum(near - far + 0.5, 0.0))
        return loss, {"triplet": loss}, non_trainable


class Distiller(OwnStep):
    """A student learns from a teacher that is not trained."""

    def __init__(self):
        super().__init__()
        self.student = keras.Sequential([keras.Input((8,)), layers.Dense(4, activation="relu"), layers.Dense(4)])
        self.teacher = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(4)])
        self.teacher.trainable = False
        self.built = True

    def call(self, x):
        return self.student(x)

    def losses_of(self, trainable, non_trainable, data):
        x, y = data[:2]
        ours = self.run(self.student, trainable, x)
        theirs = self.teacher.stateless_call([], non_trainable, x, training=False)[0]
        of_labels = ops.mean(ops.sparse_categorical_crossentropy(y, ours, from_logits=True))
        kept = ops.softmax(theirs / 3)
        of_teacher = ops.mean(ops.sum(kept * (ops.log(kept) - ops.log_softmax(ours / 3)), -1)) * 9
        return 0.1 * of_labels + 0.9 * of_teacher, {"labels": of_labels, "teacher": of_teacher}, non_trainable


PROGRAMS = [
    Program("mnist_convnet", "vision", convolutional_net, pictures, has_noise=True),
    Program("image_classification_from_scratch", "vision", small_xception, pictures, has_noise=True, relative=2e-4),
    Program("image_classification_with_vision_transformer", "vision", vision_transformer, pictures, has_noise=True),
    Program("mlp_image_classification", "vision", mlp_mixer, pictures, has_noise=True),
    Program(
        *("convmixer", "vision", convolution_mixer, pictures),
        has_noise=True,
        relative=2e-4,
        relative_of_momenta=1e-3,  # In float32 plain Keras itself is 1e-4 of the largest number of a momentum from float64.
    ),
    Program("oxford_pets_image_segmentation", "vision", u_net, lambda rng: {"x": rng.random((ROWS, 12, 12, 3), "float32"), "y": rng.integers(0, 3, (ROWS, 12, 12))}, has_noise=True),
    Program("super_resolution_sub_pixel", "vision", super_resolution, lambda rng: {"x": rng.random((ROWS, 6, 6, 1), "float32"), "y": rng.random((ROWS, 12, 12, 1), "float32")}),
    Program("attention_mil_classification", "vision", attention_over_instances, lambda rng: {"x": [rng.random((ROWS, 10), "float32") for _ in range(3)], "y": rng.integers(0, 2, ROWS)}),
    Program("spatial_transformer", "vision", spatial_transformer, lambda rng: pictures(rng, 8)),
    Program("metric_learning", "vision", own(Compared), lambda rng: {"x": rng.random((ROWS, 2, 8), "float32")}, fit_only=True),
    Program("siamese_network", "vision", own(Siamese), lambda rng: {"x": rng.random((ROWS, 3, 8), "float32")}, fit_only=True),
    Program("knowledge_distillation", "vision", own(Distiller, logits()), lambda rng: {"x": rng.random((ROWS, 8), "float32"), "y": rng.integers(0, 4, ROWS)}),
]  # fmt: skip
