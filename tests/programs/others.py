"""What generates, graphs, tables and recommendations."""

import jax
import keras
import numpy as np
from keras import layers, ops

from .kit import ROWS, OwnStep, Program, compiled, logits, own

# --- what generates --------------------------------------------------------------------------------------------------------


def small(*inner, width=6):
    return keras.Sequential([keras.Input((width,)), *inner])


class Variational(OwnStep):
    """A variational autoencoder, whose noise comes with the data."""

    def __init__(self):
        super().__init__()
        self.encoder = small(layers.Dense(8, activation="relu"), layers.Dense(4))
        self.decoder = small(layers.Dense(8, activation="relu"), layers.Dense(6), width=2)
        self.built = True

    def call(self, x):
        return self.decoder(self.encoder(x)[:, :2])

    def losses_of(self, trainable, non_trainable, data):
        x, noise = data[:2]
        found = self.run(self.encoder, trainable, x)
        mean, log_variance = found[:, :2], found[:, 2:]
        again = self.run(self.decoder, trainable, mean + ops.exp(0.5 * log_variance) * noise)
        of_pictures = ops.mean(ops.sum((x - again) ** 2, axis=-1))
        of_codes = ops.mean(ops.sum(-0.5 * (1 + log_variance - mean**2 - ops.exp(log_variance)), axis=1))
        return of_pictures + of_codes, {"pictures": of_pictures, "codes": of_codes}, non_trainable


class Adversarial(OwnStep):
    """A GAN: each of the two has its own loss, in which the other is held."""

    convolutions = False

    def __init__(self):
        super().__init__()
        if self.convolutions:
            inner = [layers.Dense(18), layers.LeakyReLU(0.2), layers.Reshape((3, 3, 2))]
            last = [layers.Conv2DTranspose(4, 4, strides=2, padding="same"), layers.Conv2D(1, 3, padding="same")]
            self.generator = small(*inner, *last, layers.Reshape((36,)), width=4)
            judge = [layers.Reshape((6, 6, 1)), layers.Conv2D(4, 3, strides=2), layers.LeakyReLU(0.2), layers.Flatten()]
            self.discriminator = small(*judge, layers.Dense(1), width=36)
        else:
            self.generator = small(layers.Dense(8, activation="relu"), layers.Dense(36), width=4)
            self.discriminator = small(layers.Dense(8, activation="relu"), layers.Dense(1), width=36)
        self.built = True

    def call(self, x):
        return self.discriminator(x)

    def losses_of(self, trainable, non_trainable, data):
        real, noise = data[:2]
        made = self.run(self.generator, trainable, noise)
        held = jax.tree.map(jax.lax.stop_gradient, trainable)
        of_judge = self.judging(trainable, real, jax.lax.stop_gradient(made))
        of_maker = self.making(self.run(self.discriminator, held, made))
        return of_judge + of_maker, {"judge": of_judge, "maker": of_maker}, non_trainable

    def judging(self, trainable, real, made):
        found = self.run(self.discriminator, trainable, ops.concatenate([real, made]))
        labels = ops.concatenate([ops.ones((len(real), 1)), ops.zeros((len(made), 1))])
        return ops.mean(ops.binary_crossentropy(labels, found, from_logits=True))

    def making(self, judged):
        return ops.mean(ops.softplus(-judged))


class ConvolutionalAdversarial(Adversarial):
    convolutions = True


class Wasserstein(Adversarial):
    """With a penalty on the gradient that each picture in between has."""

    def judging(self, trainable, real, made):
        between = 0.3 * real + 0.7 * made
        slopes = jax.grad(lambda images: ops.sum(self.run(self.discriminator, trainable, images)))(between)
        penalty = ops.mean((ops.sqrt(ops.sum(slopes**2, axis=1) + 1e-6) - 1) ** 2)
        judged = [self.run(self.discriminator, trainable, images) for images in (made, real)]
        return ops.mean(judged[0]) - ops.mean(judged[1]) + 10 * penalty

    def making(self, judged):
        return -ops.mean(judged)


class Conditional(Adversarial):
    """The generator is told which class to draw."""

    def losses_of(self, trainable, non_trainable, data):
        real, noise = data[:2]
        told = ops.concatenate([noise[:, :2], ops.one_hot(ops.cast(noise[:, 2] > 0.5, "int32"), 2)], axis=-1)
        return super().losses_of(trainable, non_trainable, (real, told))


class Diffusion(OwnStep):
    """Learns the noise in noisy pictures, and keeps an average of itself."""

    def __init__(self):
        super().__init__()
        picture, variance = keras.Input((6,)), keras.Input((1,))
        angles = variance * np.linspace(1, 30, 4, dtype="float32")
        x = layers.concatenate([picture, ops.sin(angles), ops.cos(angles)])
        x = layers.Dense(6)(layers.Dense(16, activation="swish")(x))
        self.network = keras.Model([picture, variance], x)
        self.built = True

    def call(self, x):
        return self.network([x, x[:, :1]])

    def losses_of(self, trainable, non_trainable, data):
        pictures, drawn = data[:2]
        noise, time = drawn[:, :6], drawn[:, 6:]
        noisy = ops.cos(time) * pictures + ops.sin(time) * noise
        found = self.run(self.network, trainable, [noisy, ops.sin(time) ** 2])
        loss = ops.mean(ops.abs(noise - found))
        return loss, {"noise": loss}, non_trainable


class Codebook(layers.Layer):
    """The nearest of some vectors, with a straight-through gradient."""

    def build(self, shape):
        self.vectors = self.add_weight(shape=(shape[-1], 5), initializer="uniform", name="vectors")

    def call(self, x):
        flat = ops.reshape(x, (-1, x.shape[-1]))
        distances = ops.sum(flat**2, 1, keepdims=True) + ops.sum(self.vectors**2, 0) - 2 * flat @ self.vectors
        found = ops.one_hot(ops.argmin(distances, axis=1), 5) @ ops.transpose(self.vectors)
        found = ops.reshape(found, ops.shape(x))
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(found) - x) ** 2))
        self.add_loss(ops.mean((found - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(found - x)


def quantized(noise):
    inputs = keras.Input((4, 6))
    x = Codebook()(layers.Dense(3)(inputs))
    return compiled(keras.Model(inputs, layers.Dense(6)(layers.Dense(8, activation="relu")(x))))


class MaskedConvolution(layers.Layer):
    """Sees the pixels above and to the left."""

    def build(self, shape):
        self.convolution = layers.Conv2D(4, 3, padding="same")
        self.convolution.build(shape)
        self.mask = np.ones((3, 3, 1, 1), "float32")
        self.mask[1, 1:], self.mask[2] = 0, 0

    def call(self, x):
        return ops.conv(x, self.convolution.kernel * self.mask, padding="same") + self.convolution.bias


def pixels(noise):
    x = inputs = keras.Input((6, 6, 1))
    x = ops.relu(MaskedConvolution()(x))
    x = x + ops.relu(MaskedConvolution()(x))
    outputs = layers.Conv2D(1, 1, activation="sigmoid")(x)
    return compiled(keras.Model(inputs, outputs), "binary_crossentropy")


class Flow(OwnStep):
    """Real-valued non-volume preserving: couplings, each of which moves half of the numbers."""

    def __init__(self):
        super().__init__()
        self.couplings = [small(layers.Dense(8, activation="relu"), layers.Dense(4), width=2) for _ in range(2)]
        self.masks = [np.array([0, 1], "float32"), np.array([1, 0], "float32")]
        self.built = True

    def call(self, x, training=None):
        total = 0.0
        for coupling, mask in zip(self.couplings, self.masks, strict=True):
            scale, move = ops.split(coupling(x * mask), 2, axis=1)
            scale, move = ops.tanh(scale) * (1 - mask), move * (1 - mask)
            x, total = x * ops.exp(scale) + move, total + ops.sum(scale, axis=1)
        return x, total

    def losses_of(self, trainable, non_trainable, data):
        (codes, volume), _ = self.stateless_call(trainable, non_trainable, data[0], training=True)
        loss = -ops.mean(-0.5 * ops.sum(codes**2, axis=1) + volume)
        return loss, {"likelihood": loss}, non_trainable


class Rays(layers.Layer):
    """Adds up the colours along each ray, by how dense what they meet is."""

    def call(self, found):  # (rays, places, 4)
        density, colours = ops.relu(found[..., 3]), ops.sigmoid(found[..., :3])
        opaque = 1 - ops.exp(-density * 0.1)
        passed = ops.cumprod(1 - opaque + 1e-7, axis=1) / (1 - opaque + 1e-7)
        return ops.sum((opaque * passed)[..., None] * colours, axis=1)


def radiance(noise):
    inputs = keras.Input((8, 3))
    codes = [function(2.0**power * inputs) for power in range(3) for function in (ops.sin, ops.cos)]
    x = layers.Dense(12, activation="relu")(layers.concatenate([inputs, *codes]))
    return compiled(keras.Model(inputs, Rays()(layers.Dense(4)(x))))


# --- graphs ----------------------------------------------------------------------------------------------------------------

NODES = 12
EDGES = np.random.default_rng(3).integers(0, NODES, (30, 2))


class GraphAttention(keras.Model):
    """The graph is the model's; a row is the number of one of its nodes."""

    def __init__(self):
        super().__init__()
        self.features = np.random.default_rng(4).random((NODES, 5)).astype("float32")
        self.first, self.score, self.last = layers.Dense(6), layers.Dense(1), layers.Dense(3)

    def call(self, nodes):
        states = self.first(self.features)
        pairs = ops.reshape(ops.take(states, EDGES, axis=0), (len(EDGES), -1))
        scores = ops.exp(ops.clip(ops.leaky_relu(self.score(pairs)), -2, 2))[:, 0]
        sums = ops.segment_sum(scores, EDGES[:, 0], NODES)
        weights = scores / ops.take(sums, EDGES[:, 0])
        near = ops.segment_sum(ops.take(states, EDGES[:, 1], axis=0) * weights[:, None], EDGES[:, 0], NODES)
        return self.last(ops.take(ops.relu(near), nodes, axis=0))


class Messages(layers.Layer):
    """Passes messages between the atoms of each molecule, whose bonds are a matrix."""

    def build(self, shapes):
        self.message = layers.Dense(shapes[0][-1])
        self.message.build(shapes[0])
        self.update = layers.GRUCell(shapes[0][-1])
        self.update.build((None, shapes[0][-1]))

    def call(self, inputs):
        atoms, bonds = inputs
        for _ in range(2):
            arriving = ops.matmul(bonds, self.message(atoms))
            flat = [ops.reshape(one, (-1, atoms.shape[-1])) for one in (arriving, atoms)]
            atoms = ops.reshape(self.update(flat[0], [flat[1]])[0], ops.shape(atoms))
        return atoms


def molecules(noise):
    atoms, bonds = keras.Input((5, 4)), keras.Input((5, 5))
    x = layers.GlobalAveragePooling1D()(Messages()([atoms, bonds]))
    return compiled(keras.Model([atoms, bonds], layers.Dense(1, activation="sigmoid")(x)), "binary_crossentropy")


def node_pairs(noise):
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("target", "context")}
    embed = layers.Embedding(NODES, 5)
    x = layers.Dot(1)([embed(inputs["target"]), embed(inputs["context"])])
    return compiled(keras.Model(inputs, x), keras.losses.BinaryCrossentropy(from_logits=True))


# --- tables and recommendations --------------------------------------------------------------------------------------------


def table(rng, classes=2):
    x = {f"number_{n}": rng.random((ROWS, 1), "float32") for n in range(3)}
    x |= {f"class_{n}": rng.integers(0, 5, (ROWS, 1)) for n in range(2)}
    return {"x": x, "y": rng.integers(0, classes, ROWS)}


def columns():
    numbers = {f"number_{n}": keras.Input((1,), name=f"number_{n}") for n in range(3)}
    classes = {f"class_{n}": keras.Input((1,), dtype="int32", name=f"class_{n}") for n in range(2)}
    return numbers, classes


def wide_and_deep(noise):
    numbers, classes = columns()
    wide = layers.concatenate([layers.CategoryEncoding(5, output_mode="one_hot")(one) for one in classes.values()])
    wide = noise.normalization()(layers.concatenate([wide, *numbers.values()]))
    deep = layers.concatenate(
        [*(layers.Flatten()(layers.Embedding(5, 3)(one)) for one in classes.values()), *numbers.values()]
    )
    crossed = deep + deep * layers.Dense(deep.shape[-1])(deep)
    deep = noise.dropout()(layers.ReLU()(noise.normalization()(layers.Dense(6)(deep))))
    found = layers.Dense(2)(layers.concatenate([wide, deep, crossed]))
    return compiled(keras.Model(numbers | classes, found), logits(), ["accuracy"])


def tab_transformer(noise):
    numbers, classes = columns()
    x = ops.stack([layers.Flatten()(layers.Embedding(5, 4)(one)) for one in classes.values()], axis=1)
    x = layers.LayerNormalization()(x + noise.dropout()(layers.MultiHeadAttention(2, 4, dropout=noise.rate)(x, x)))
    x = layers.concatenate(
        [layers.Flatten()(x), layers.LayerNormalization()(layers.concatenate(list(numbers.values())))]
    )
    return compiled(keras.Model(numbers | classes, layers.Dense(2)(noise.normalization()(x))), logits())


def gated(noise):
    numbers, classes = columns()
    columns_ = [layers.Dense(4)(one) for one in numbers.values()]
    columns_ += [layers.Flatten()(layers.Embedding(5, 4)(one)) for one in classes.values()]
    weights = layers.Softmax()(layers.Dense(5)(noise.dropout()(layers.concatenate(columns_))))
    kept = ops.stack([one * layers.Dense(4, activation="sigmoid")(one) for one in columns_], axis=1)
    x = ops.sum(kept * weights[..., None], axis=1)
    return compiled(keras.Model(numbers | classes, layers.Dense(2)(layers.LayerNormalization()(x))), logits())


class Tree(layers.Layer):
    """A decision tree: at each node a row goes both ways, by chances."""

    def build(self, shape):
        self.decide = layers.Dense(4, activation="sigmoid")
        self.decide.build(shape)
        self.leaves = self.add_weight(shape=(4, 2), name="leaves")

    def call(self, x):
        decisions = ops.expand_dims(self.decide(x), 2)
        decisions = ops.concatenate([decisions, 1 - decisions], axis=2)
        chances, begin, end = ops.ones_like(x[:, :1, None]), 1, 2
        for _ in range(2):
            chances = ops.repeat(ops.reshape(chances, (-1, begin, 1)), 2, axis=2) * decisions[:, begin:end, :]
            begin, end = end, end + 2
        return ops.matmul(ops.reshape(chances, (-1, 4)), self.leaves)


def forest(noise):
    inputs = keras.Input((6,))
    x = noise.normalization()(inputs)
    return compiled(keras.Model(inputs, layers.average([Tree()(x) for _ in range(3)])), logits())


def fraud(noise):
    inner = [layers.Dense(8, activation="relu"), layers.Dense(8, activation="relu"), noise.dropout()]
    found = layers.Dense(1, activation="sigmoid")
    return compiled(
        keras.Sequential([keras.Input((6,)), *inner, found]), "binary_crossentropy", [keras.metrics.Recall()]
    )


class Recommender(keras.Model):
    """As on keras.io: ``tensordot`` over two axes multiplies and sums over the batch as well."""

    def __init__(self):
        super().__init__()
        self.users, self.movies = layers.Embedding(15, 4), layers.Embedding(15, 4)
        self.user_bias, self.movie_bias = layers.Embedding(15, 1), layers.Embedding(15, 1)

    def call(self, x):
        users, movies = self.users(x[:, 0]), self.movies(x[:, 1])
        return ops.sigmoid(ops.tensordot(users, movies, 2) + self.user_bias(x[:, 0]) + self.movie_bias(x[:, 1]))


def two_towers(noise):
    user, movie = (keras.Input((), dtype="int32", name=name) for name in ("user", "movie"))
    x = layers.concatenate([layers.Embedding(15, 4)(user), layers.Embedding(15, 4)(movie)])
    return compiled(keras.Model({"user": user, "movie": movie}, layers.Dense(1)(layers.Dense(8, activation="relu")(x))))


def behaviour(noise):
    """A transformer over the movies that somebody has seen and the one to be rated."""
    seen, rated = keras.Input((5,), dtype="int32", name="seen"), keras.Input((), dtype="int32", name="rated")
    embed = layers.Embedding(15, 4)
    x = layers.concatenate([embed(seen), ops.expand_dims(embed(rated), 1)], axis=1)
    x = layers.LeakyReLU()(layers.LayerNormalization()(x + noise.dropout()(layers.MultiHeadAttention(2, 4)(x, x))))
    x = noise.dropout()(layers.LeakyReLU()(noise.normalization()(layers.Dense(6)(layers.Flatten()(x)))))
    return compiled(keras.Model({"seen": seen, "rated": rated}, layers.Dense(1)(x)))


# --- all ---------------------------------------------------------------------------------------------------------------------


def numbers(*shapes, to=None, whole=0):
    def data(rng):
        x = [rng.random((ROWS, *shape), "float32") for shape in shapes]
        found = {"x": x[0] if len(x) == 1 else x}
        if to is not None:
            found["y"] = rng.integers(0, whole, (ROWS, *to)) if whole else rng.random((ROWS, *to), "float32")
        return found

    return data


def identifiers(names, most, to=()):
    def data(rng):
        return {
            "x": {name: rng.integers(0, most, (ROWS, *shape)) for name, shape in names.items()},
            "y": rng.integers(0, 2, (ROWS, *to)).astype("float32"),
        }

    return data


def ratings(rng):
    return {"x": rng.integers(0, 15, (ROWS, 2)), "y": rng.random((ROWS, 1), "float32")}


PROGRAMS = [
    Program("vae", "generative", own(Variational), numbers((6,), to=(2,)), fit_only=True),
    Program("gan_ada", "generative", own(Adversarial), numbers((36,), to=(4,)), fit_only=True),
    Program("dcgan_overriding_train_step", "generative", own(ConvolutionalAdversarial), numbers((36,), to=(4,)), fit_only=True),
    Program("wgan_gp", "generative", own(Wasserstein), numbers((36,), to=(4,)), fit_only=True),
    Program("conditional_gan", "generative", own(Conditional), numbers((36,), to=(4,)), fit_only=True),
    Program("ddim", "generative", own(Diffusion), numbers((6,), to=(7,)), fit_only=True),
    Program("vq_vae", "generative", quantized, numbers((4, 6), to=(4, 6))),
    Program("pixelcnn", "generative", pixels, numbers((6, 6, 1), to=(6, 6, 1))),
    Program("real_nvp", "generative", own(Flow), numbers((2,)), fit_only=True),
    Program("nerf", "generative", radiance, numbers((8, 3), to=(3,))),
    Program("gat_node_classification", "graph", lambda noise: compiled(GraphAttention(), logits()), lambda rng: {"x": rng.integers(0, NODES, ROWS), "y": rng.integers(0, 3, ROWS)}),
    Program("mpnn_molecular_graphs", "graph", molecules, numbers((5, 4), (5, 5), to=(1,))),
    Program("node2vec_movielens", "graph", node_pairs, identifiers({"target": (), "context": ()}, NODES, (1,))),
    Program("wide_deep_cross_networks", "structured", wide_and_deep, table, has_noise=True),
    Program("tabtransformer", "structured", tab_transformer, table, has_noise=True),
    Program("classification_with_grn_and_vsn", "structured", gated, table, has_noise=True),
    Program("deep_neural_decision_forests", "structured", forest, numbers((6,), to=(), whole=2), has_noise=True),
    Program("imbalanced_classification", "structured", fraud, lambda rng: numbers((6,), to=(1,), whole=2)(rng) | {"sample_weight": rng.random(ROWS).astype("float32")}, has_noise=True),
    Program("collaborative_filtering_for_movielens", "recommendation", lambda noise: compiled(Recommender(), "binary_crossentropy"), ratings, global_batch="dot_general sums over the rows of both its inputs"),
    Program("basic_ranking", "recommendation", two_towers, identifiers({"user": (), "movie": ()}, 15, (1,))),
    Program("movielens_recommendations_transformers", "recommendation", behaviour, identifiers({"seen": (5,), "rated": ()}, 15, (1,)), has_noise=True),
]  # fmt: skip
