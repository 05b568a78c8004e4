"""Only the rows that a batch needs travel, and every bit is as if all had."""

import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from lockstep.parameter_server.gradient_step import specs_of
from lockstep.parameter_server.sharding import FixedShardsPartitioner
from lockstep.parameter_server.sparse_rows import (
    EmbeddingRows,
    SparseGradient,
    TouchedRows,
    mean_gradient,
    sparsify,
    tables_of,
)
from tests.parameter_server.threaded_servers import Servers
from tests.support.marks import quick_first

HEIGHT, WIDTH, BATCH, LENGTH = 2000, 8, 6, 5
LAYERS = keras.layers


def ids_of(seed, shape=(BATCH, LENGTH), height=HEIGHT):
    return np.random.default_rng(seed).integers(0, height, shape).astype("int32")


def embedding(name="words", **options):
    return LAYERS.Embedding(HEIGHT, WIDTH, name=name, **options)


def headed(inputs, features):
    mean = LAYERS.GlobalAveragePooling1D(name="mean")(features)
    return keras.Model(inputs, LAYERS.Dense(1, name="head")(mean), name="net")


def plain(**options):
    inputs = keras.Input((LENGTH,), dtype="int32")
    return headed(inputs, embedding(**options)(inputs))


def sequential():
    layers = [embedding(), LAYERS.Flatten(name="flat"), LAYERS.Dense(1, name="head")]
    return keras.Sequential([keras.Input((LENGTH,), dtype="float32"), *layers], name="net")


def shifted():
    inputs = keras.Input((LENGTH,), dtype="int32")
    return headed(inputs, embedding()((inputs * 7 + 1) % HEIGHT))


def twice():
    inputs, layer = keras.Input((LENGTH,), dtype="int32"), embedding()
    return headed(inputs, layer(inputs) + layer(HEIGHT - 1 - inputs))


def several():
    inputs = keras.Input((LENGTH,), dtype="int32")
    return headed(inputs, embedding()(inputs) * embedding("others")(inputs // 2))


def recurrent():
    inputs = keras.Input((LENGTH,), dtype="int32")
    last = LAYERS.GRU(3, name="gru")(embedding(mask_zero=True)(inputs))
    return keras.Model(inputs, LAYERS.Dense(1, name="head")(last), name="net")


def nested():
    inputs = keras.Input((LENGTH,), dtype="int32")
    inner = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), embedding()], name="inner")
    return headed(inputs, inner(inputs))


class Own(keras.Model):
    def __init__(self):
        super().__init__(name="net")
        self.words, self.head = embedding(), LAYERS.Dense(1, name="head")

    def call(self, x):
        return self.head(keras.ops.mean(self.words(x[:, ::2]), axis=1))


def subclassed():
    model = Own()
    model(ids_of(0))
    return model


BY_ROWS = {
    "plain": plain,
    "sequential, ids as floats": sequential,
    "ids computed from ids": shifted,
    "one layer called twice": twice,
    "several": several,
    "masked": recurrent,
    "nested": nested,
    "subclassed": subclassed,
}


class Tied(Own):
    def call(self, x):
        mean = keras.ops.mean(self.words(x), axis=1)
        return self.head(mean) + mean @ keras.ops.transpose(self.words.embeddings)


class Learned(Own):
    """Looks up where its own weights say."""

    def call(self, x):
        place = keras.ops.cast(keras.ops.abs(self.head(keras.ops.cast(x, "float32"))), "int32") % HEIGHT
        return keras.ops.mean(self.words(place), axis=1)


class Pair(Own):
    """Its train_step would call it in another way than on a batch alone."""

    def call(self, x, y):
        return self.head(self.words(x) * self.words(y))


class Worker:
    """Computes gradients of a model, and pulls and pushes them whole or by rows."""

    def __init__(self, model, client, touched=None):
        self.model, self.client, self.touched = model, client, touched
        self.names = [variable.path for variable in model.trainable_variables]
        self.traffic = []
        self._gradient = jax.jit(jax.value_and_grad(self._loss))

    def _loss(self, values, x):
        others = [jnp.asarray(variable.value) for variable in self.model.non_trainable_variables]
        out, _, losses = self.model.stateless_call([values[name] for name in self.names], others, x, return_losses=True)
        return jnp.mean((out - 1) ** 2) + sum(losses)

    def step(self, x):
        rows = self.touched.needed_rows(x) if self.touched else {}
        before = np.array(self.client.traffic)
        found = self.client.pull(rows)
        values = self.touched.full_tables(found, rows) if self.touched else found
        if self.touched and not self.touched.is_decided:
            self.touched.decide(values, x, lambda values: self._gradient(values, x))
        loss, gradients = self._gradient(values, x)
        gradients = {name: np.asarray(gradient) for name, gradient in gradients.items()}
        pushed = sparsify(gradients) if self.touched else gradients
        self.client.push(pushed)
        sent, received = np.array(self.client.traffic) - before
        self.traffic.append((int(sent), int(received)))
        return float(loss), rows


def trained(model, batches, by_rows, *, count=1, partitioner=None, optimizer=lambda: keras.optimizers.Adam(0.01)):
    """Losses, values and state of servers after so many batches; the rows that were pulled, and what the worker has said."""
    said, values = [], {variable.path: variable.numpy() for variable in model.trainable_variables}
    with Servers(count, specs=specs_of(model), partitioner=partitioner, optimizer=optimizer) as servers:
        client = servers.client(0)
        client.fill(values)
        worker = Worker(model, client, TouchedRows(model, said.append) if by_rows else None)
        losses, rows = zip(*[worker.step(x) for x in batches], strict=True)
        return losses, client.state(), rows, said, worker.traffic


def made(build):
    keras.utils.set_random_seed(1)
    return build()


def assert_same_bits(found, expected):
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        assert all(one[name].tobytes() == value.tobytes() for name, value in other.items())


def nets_and_servers():
    """Each net on one server or, cut, on two; one on both, and all in the nightly set."""
    for number, name in enumerate(BY_ROWS):
        for turn, (count, partitioner) in enumerate([(1, None), (2, FixedShardsPartitioner(2))]):
            mark = pytest.mark.nightly if number and (number + turn) % 2 else ()
            yield pytest.param(name, count, partitioner, id=f"{count}-{name}", marks=mark)


@pytest.mark.parametrize(("name", "count", "partitioner"), quick_first(nets_and_servers()))
def test_training_by_rows_gives_the_bits_of_training_with_whole_tables(name, count, partitioner):
    model = made(BY_ROWS[name])
    batches = [ids_of(seed) for seed in range(4)]
    batches[2][:, 1:] = batches[2][:, :1]  # One row many times.
    expected = trained(model, batches, by_rows=False, count=count, partitioner=partitioner)
    found = trained(model, batches, by_rows=True, count=count, partitioner=partitioner)
    assert_same_bits(found, expected)
    assert not found[3]
    assert all(rows.keys() == tables_of(model).keys() for rows in found[2][1:])


class Changing(Own):
    """Looks up rows that the clock or a state decides."""

    def __init__(self):
        super().__init__()
        self.shift = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros", name="shift")

    def call(self, x):
        return self.head(keras.ops.mean(self.words(x + self.shift), axis=1))


def own(kind, *inputs):
    def build():
        model = kind()
        model(*inputs or [ids_of(0)])
        return model

    return build


WHOLE = {
    "the table is the last layer's kernel": (
        own(Tied),
        "net/words/embeddings .*: the step uses rows that its layer does not",
    ),
    "a regularizer": (
        lambda: plain(embeddings_regularizer="l2"),
        "words/embeddings .*: the step uses rows that its layer",
    ),
    "ids of weights": (
        own(Learned),
        "words/embeddings is pulled whole for each batch: which rows are looked up depends on var",
    ),
    "ids of a state": (
        own(Changing),
        "words/embeddings is pulled whole for each batch: which rows are looked up depends on var",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_a_table_whose_other_rows_are_used_is_pulled_whole_and_logged(name):
    build, sentence = WHOLE[name]
    model = made(build)
    batches = [ids_of(seed) for seed in range(3)]
    expected = trained(model, batches, by_rows=False)
    *found, rows, said, _ = trained(model, batches, by_rows=True)
    assert_same_bits(found, expected)
    assert not any(rows)
    assert [bool(re.search(sentence, line)) for line in said] == [True]


def test_of_two_tables_only_the_one_with_other_uses_is_pulled_whole():
    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        others = embedding("others", embeddings_regularizer="l2")
        return headed(inputs, embedding()(inputs) * others(inputs))

    model = made(build)
    *_, rows, said, _ = trained(model, [ids_of(0), ids_of(1)], by_rows=True)
    assert [list(each) for each in rows] == [[], ["words/embeddings"]]
    assert [line.partition(" ")[0] for line in said] == ["others/embeddings"]


@pytest.mark.slow
def test_a_table_of_which_the_first_batch_needs_all_rows_is_decided_by_a_later_one():
    model = made(several)
    every = np.arange(HEIGHT, dtype="int32").reshape(-1, LENGTH)
    batches = [every, every, ids_of(0), ids_of(1)]
    expected = trained(model, batches, by_rows=False)
    found = trained(model, batches, by_rows=True)
    assert_same_bits(found, expected)
    some, both = ["others/embeddings"], ["others/embeddings", "words/embeddings"]
    assert [sorted(rows) for rows in found[2]] == [[], some, some, both]


def test_a_model_that_is_not_called_on_a_batch_alone_is_pulled_whole():
    model, said = own(Pair, ids_of(0), ids_of(1))(), []
    touched = TouchedRows(model, said.append)
    touched.decide({"net/words/embeddings": np.ones((HEIGHT, WIDTH))}, ids_of(0), lambda values: 0.0)
    assert touched.is_decided
    assert touched.needed_rows(ids_of(0)) == {}
    assert "the model cannot be called on a batch alone" in said[0]


def test_only_trained_tables_with_many_rows_are_sparse():
    def build():
        inputs = keras.Input((LENGTH,), dtype="int32")
        adapted, frozen = embedding("adapted"), embedding("frozen", trainable=False)
        few = LAYERS.Embedding(20, WIDTH, name="few")
        model = headed(inputs, adapted(inputs) + frozen(inputs) + few(inputs % 20))
        adapted.enable_lora(2)
        return model

    model = made(build)
    assert list(tables_of(model)) == ["few/embeddings"]
    assert TouchedRows(model).is_decided


class Twins(keras.Model):
    """Two tables of one path, and one of another."""

    def __init__(self):
        super().__init__(name="net")
        self.tables = [embedding(), embedding(), embedding("others")]

    def call(self, x):
        return sum(table(x[:, number : number + 2]) for number, table in enumerate(self.tables))


def test_tables_of_one_path_are_pulled_whole():
    model = Twins()
    model(ids_of(0))
    assert list(tables_of(model)) == ["net/others/embeddings"]


def test_ids_outside_of_a_table_are_rows_as_the_layer_takes_them():
    inputs = keras.Input((4,), dtype="int32")
    layer = embedding()
    model = keras.Model(inputs, layer(inputs))
    x = np.array([[-1, -HEIGHT, -HEIGHT - 1, HEIGHT], [3, HEIGHT - 1, 3, 10 * HEIGHT]], "int32")
    (name, rows), *_ = EmbeddingRows(model, tables_of(model)).rows(x).items()
    table = np.arange(HEIGHT * WIDTH, dtype="float32").reshape(HEIGHT, WIDTH)
    out, _ = model.stateless_call([table], [], x)
    shown = np.unique(np.asarray(out)[..., 0])
    assert name == "words/embeddings"
    assert rows.tolist() == [0, 3, HEIGHT - 1]
    assert (shown[np.isfinite(shown)] == table[rows, 0]).all()
    gradient = jax.grad(lambda table: jnp.nansum(model.stateless_call([table], [], x)[0]))(table)
    assert np.flatnonzero(np.asarray(gradient).any(axis=1)).tolist() == rows.tolist()


@pytest.mark.slow
def test_batches_of_other_lengths_and_batches_that_need_most_of_a_table():
    model = made(several)
    many = ids_of(9, (HEIGHT, LENGTH))
    batches = [many, ids_of(0), many, ids_of(1, (2, LENGTH)), ids_of(2)]
    expected = trained(model, batches, by_rows=False)
    found = trained(model, batches, by_rows=True)
    assert_same_bits(found, expected)
    assert [len(rows) for rows in found[2]] == [0, 2, 1, 2, 2]  # "others" has no ids above a half.


def test_nonfinite_batches_decide_nothing():
    model, x = made(plain), ids_of(0)
    touched = TouchedRows(model)
    values = {variable.path: variable.numpy() for variable in model.trainable_variables}
    touched.decide(values, x, lambda values: np.float32("nan"))
    assert not touched.is_decided
    touched.decide(values, x, lambda values: values["words/embeddings"][x].sum())
    assert touched.is_decided


def test_a_row_that_was_not_pulled_is_nan():
    model, x = made(plain), ids_of(0)
    touched = TouchedRows(model)
    values = {variable.path: variable.numpy() for variable in model.trainable_variables}
    table = values["words/embeddings"]
    touched.decide(values, x, lambda values: values["words/embeddings"][x].sum())
    for seed in range(3):
        rows = touched.needed_rows(ids_of(seed))
        found = touched.full_tables(values | {"words/embeddings": table[rows["words/embeddings"]]}, rows)[
            "words/embeddings"
        ]
        expected = np.full_like(table, np.nan)
        expected[ids_of(seed)] = table[ids_of(seed)]
        np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "partitioner"), [(1, None), (2, FixedShardsPartitioner(2))])
def test_bytes_are_those_of_the_rows(count, partitioner):
    model = made(plain)
    batches = [ids_of(0), ids_of(1)]
    _, _, rows, _, traffic = trained(model, batches, by_rows=True, count=count, partitioner=partitioner)
    *_, whole = trained(model, batches, by_rows=False, count=count, partitioner=partitioner)
    others = sum(variable.numpy().nbytes for variable in model.trainable_variables[1:])
    named = len(np.unique(batches[1]))
    assert len(rows[1]["words/embeddings"]) == named
    heads = 2000 * count  # Names, shapes and the like, of four messages.
    for found, payload in (
        (traffic[1][0], named * 4 + named * (WIDTH + 1) * 4 + others),  # The rows asked for; those that are pushed.
        (traffic[1][1], named * WIDTH * 4 + others),
        (whole[1][0], HEIGHT * WIDTH * 4 + others),
        (whole[1][1], HEIGHT * WIDTH * 4 + others),
    ):
        assert payload < found < payload + heads


def test_only_large_gradients_with_many_zero_rows_become_rows():
    random = np.random.default_rng(0)

    def table(height, count):
        found = np.zeros((height, 2, 3), "float32")
        found[random.permutation(height)[:count], random.integers(0, 2)] = 1
        return found

    gradients = {"few": table(1024, 512), "most": table(1024, 513), "small": table(1023, 1), "none": table(2000, 0)}
    gradients |= {"vector": np.zeros(5000, "float32"), "number": np.zeros((), "float32")}
    found = sparsify(gradients)
    assert [name for name, each in found.items() if isinstance(each, SparseGradient)] == ["few", "none"]
    for name in ("few", "none"):
        dense = np.zeros_like(gradients[name])
        dense[found[name].indices] = found[name].values
        assert (dense == gradients[name]).all()
        assert found[name].indices.dtype == np.int32
    assert all(found[name] is gradients[name] for name in ("most", "small", "vector", "number"))


def test_the_mean_of_large_gradients_of_float16_is_finite():
    gradient, rows = jnp.full((3,), 2048, "float16"), [jnp.float32(40), jnp.float32(24)]
    found = mean_gradient(jnp.zeros((3,), "float16"), rows, [gradient, gradient])
    assert found.dtype == "float16"
    assert (found == 2048).all()
