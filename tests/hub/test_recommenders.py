"""Models of Keras Recommenders (keras-rs) have the numbers of one device, also with tables of a million rows."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers

from tests.laws.compare import assert_close

from .kit import assert_same_state, mirrored

keras_rs = pytest.importorskip("keras_rs", reason="Not installed beside KerasHub: ./scripts/test-hub runs this")

ROWS, WORDS, WIDTH = 21, 50, 8
STRATEGIES = {"replicated": mirrored, "sharded": lambda: mirrored(shard="variables")}


@pytest.fixture(params=STRATEGIES)
def strategy(request, monkeypatch):
    """Also a strategy that shards the variables of these small models."""
    monkeypatch.setattr("lockstep.devices.placement.SHARD_FROM", 3)
    return STRATEGIES[request.param]()


def ids(words=WORDS, columns=2):
    return np.random.default_rng(0).integers(0, words, (ROWS, columns)).astype("int32")


def train(build, strategy, x, y=None, **options):
    """Train what ``build`` compiles in the scope of a strategy, or with plain Keras; the last batch has fewer rows."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(2)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, **options)
    return model


def ranking(words=WORDS):
    """Two embeddings, their interactions, and a cross network, as in DLRM and DCN."""
    inputs = keras.Input((2,), dtype="int32")
    user = layers.Embedding(words, WIDTH, name="users")(inputs[:, 0])
    movie = layers.Embedding(words, WIDTH, name="movies")(inputs[:, 1])
    together = layers.Concatenate()([user, movie])
    crossed = keras_rs.layers.FeatureCross(projection_dim=4)(together, together)
    interactions = keras_rs.layers.DotInteraction()([user, movie])
    rating = layers.Dense(1)(layers.Concatenate()([crossed, interactions]))
    model = keras.Model(inputs, rating)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def test_a_ranking_model_has_the_numbers_of_one_device(strategy):
    x, y = ids(), np.linspace(1, 5, ROWS, dtype="float32")[:, None]
    assert_same_state(train(ranking, strategy, x, y), train(ranking, None, x, y))


def test_tables_of_a_million_rows_are_shared_out(monkeypatch):
    million = 1_000_000
    x, y = ids(million), np.linspace(1, 5, ROWS, dtype="float32")[:, None]
    model = train(lambda: ranking(million), mirrored(shard="variables"), x, y)
    table = model.get_layer("users").embeddings.value
    assert {shard.data.shape[0] for shard in table.addressable_shards} == {million // 2}
    expected = train(lambda: ranking(million), None, x, y)
    for ours, theirs in zip(model.weights, expected.weights, strict=True):
        assert_close(np.asarray(ours), np.asarray(theirs), 1e-5, theirs.path)


class Retrieval(keras.Model):
    """Two towers; the movies of a batch are the candidates of each of its users, as in the examples of keras-rs."""

    def __init__(self):
        super().__init__()
        self.users, self.movies = layers.Embedding(WORDS, WIDTH), layers.Embedding(WORDS, WIDTH)
        self.find = keras_rs.layers.BruteForceRetrieval(k=3, return_scores=False)

    def build(self, shape):
        self.users.build(shape)
        self.movies.build(shape)
        self.find.candidate_embeddings = self.movies.embeddings
        self.find.build((None, WIDTH))

    def call(self, x, training=False):
        user = self.users(x[:, 0])
        return {"user": user, "movie": self.movies(x[:, 1])} if training else {"found": self.find(user)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        scores = keras.ops.matmul(y_pred["user"], keras.ops.transpose(y_pred["movie"]))
        own = keras.ops.eye(keras.ops.shape(scores)[0])
        return keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")(own, scores)


def retrieval():
    model = Retrieval()
    model.compile(keras.optimizers.SGD(0.1))
    return model


def test_a_retrieval_model_sees_all_candidates_of_the_batch(strategy):
    found, expected = (train(retrieval, each, ids()) for each in (strategy, None))
    assert_same_state(found, expected)
    np.testing.assert_array_equal(*(model.predict(ids(), verbose=0)["found"] for model in (found, expected)))


def distributed_embedding():
    table = keras_rs.layers.TableConfig("words", WORDS, WIDTH, optimizer="sgd", placement="default_device")
    feature = keras_rs.layers.FeatureConfig("ids", table, (8, 2), (8, WIDTH))
    inputs = keras.Input((2,), batch_size=8, dtype="int32", name="ids")
    pooled = keras_rs.layers.DistributedEmbedding({"ids": feature})({"ids": inputs})["ids"]
    model = keras.Model({"ids": inputs}, layers.Dense(1)(pooled))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_a_distributed_embedding_on_the_default_device_has_the_numbers_of_one_device(strategy):
    x, y = {"ids": ids()[:16]}, np.ones((16, 1), "float32")
    assert_same_state(train(distributed_embedding, strategy, x, y), train(distributed_embedding, None, x, y))
