"""Programs for TensorFlow become programs for Lockstep that run; what has no counterpart is marked, and nothing else is touched."""

import ast
import os
import re
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest

import lockstep
from lockstep import OptionError, cli
from lockstep.tools.migrate import translate as translate_module
from lockstep.tools.migrate.incompatibilities import WRITTEN
from lockstep.tools.migrate.rewrite_rules import _SIZES
from lockstep.tools.migrate.source import Edit, exists
from lockstep.tools.migrate.symbol_map import ABSENT, RENAMED, STRATEGY_METHODS, translated, why_absent
from lockstep.tools.migrate.translate import migrate, translate
from tests.pages import names_the_backend_first

PROGRAMS = Path(__file__).parent / "programs"
PAGE = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text()
TF = "import tensorflow as tf\n"
ONE = "s = tf.distribute.MirroredStrategy()\n"
HIDDEN = '.config.set_visible_devices([], "GPU")  # TensorFlow may read data; the GPUs are for JAX.\n'


def translation(name):
    return translate((PROGRAMS / f"{name}.txt").read_text(), name)


def new_lines(code):
    """The lines below the imports that Lockstep needs; a second translation changes nothing."""
    after = translate(TF + code).after
    assert translate(after).after == after
    return after.split("import lockstep\n")[-1].split("import keras\n")[-1].strip()


# --- whole programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("table", "replicas 1 loss is finite True"),
        ("resume", "epochs 1 2"),
        ("workers", "workers 1 layers 156"),
    ],
)
def test_translated_program_runs_and_needs_no_tensorflow(name, printed, python, tmp_path):
    found = translation(name)
    assert not found.todos
    assert "tensorflow" not in found.after.partition('"""\n\n')[2]
    (tmp_path / "train.py").write_text(f"import sys\nsys.modules['tensorflow'] = None\n{found.after}")
    assert names_the_backend_first(found.after)
    done = python(script="train.py", cwd=tmp_path, environ={"KERAS_BACKEND": None}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed


def test_logical_gpus_become_replicas_and_the_input_is_cached_first_and_the_loss_mended():
    found = translation("logical_gpus")
    assert 'lockstep.MirroredStrategy(["gpu:0"], replicas=2)' in found.after
    assert "from_logits=False" in found.after
    calls = [
        node.func.attr
        for node in ast.walk(ast.parse(found.after))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    chain = [call for call in calls if call in ("cache", "shuffle", "batch", "prefetch")]
    assert chain == ["prefetch", "batch", "shuffle", "cache"]  # The tree has the last call outermost.
    assert [mark.sentence.partition(":")[0] for mark in found.todos] == ["tf.config.list_physical_devices"]
    assert 'tf.config.set_visible_devices([], "GPU")' in found.after  # tf.data stays.


def test_what_has_no_counterpart_is_marked_where_it_stands_and_left_as_it_is():
    found = translation("towers")
    before = (PROGRAMS / "towers.txt").read_text().splitlines()
    rest = [line for line in found.after.splitlines() if "lockstep migrate" not in line]
    added = [line for line in rest if line not in before]
    assert added == [
        "import os",
        'os.environ.setdefault("KERAS_BACKEND", "jax")  # Before Keras is imported.',
        'tf.config.set_visible_devices([], "GPU")  # TensorFlow may read data; the GPUs are for JAX.',
    ]
    marked = {mark.sentence.partition(":")[0] for mark in found.todos}
    assert marked == {
        "tf.compat.v1.layers.dense",
        "tf.device",
        "tf.placeholder",
        "tf.variable_scope",
        "tf.train.Saver",
        "tf.Graph",
        "tf.Session",
    }
    lines = found.after.splitlines()
    for mark in found.todos:
        assert mark.sentence.partition(":")[0] in lines[mark.line - 1]
        assert any(mark.sentence in line for line in lines[mark.line - 4 : mark.line - 1])


@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("*.txt")))
def test_what_is_translated_is_not_changed_by_translating_it_again(name):
    once = translation(name)
    again = translate(once.after)
    assert again.after == once.after
    assert again.todos == once.todos


def test_a_program_without_tensorflow_and_keras_stays_as_it_is():
    code = "import torch\nx = 1  # tf.distribute\n"
    found = translate(code)
    assert (found.after, found.todos) == (code, ())


# --- the tables ------------------------------------------------------------------------------------------------------


def public_names():
    """All that ``tf.distribute`` has in common with Lockstep, from Lockstep's side."""
    names = [name for name in lockstep.__all__ if name[0].isupper() and not name.endswith("Error")]
    return [*names, *(f"experimental.{name}" for name in lockstep.experimental.__all__)]


def test_each_name_of_the_table_leads_to_something():
    for name in RENAMED:
        becomes = translated(name)
        if name not in ABSENT and not becomes.startswith("keras.callbacks.experimental"):
            assert exists(becomes) or becomes.startswith("lockstep.callbacks.TensorBoard"), (name, becomes)


@pytest.mark.parametrize("name", public_names())
def test_a_name_of_lockstep_under_tf_distribute_is_translated(name):
    assert new_lines(f"found = tf.distribute.{name}") == f"found = lockstep.{name}"


@pytest.mark.parametrize("name", sorted(name for name in ABSENT if ABSENT[name]))
def test_a_name_that_is_absent_is_marked_with_what_to_write(name):
    found = translate(f"import tensorflow as tf\nimport keras\nfound = {name.replace('tensorflow', 'tf')}\n")
    (mark,) = found.todos
    assert mark.sentence.endswith(ABSENT[name])


@pytest.mark.parametrize(("code", "reason"), [
    ("tf.keras.utils.multi_gpu_model\n", ABSENT["keras.utils.multi_gpu_model"]),
    ("from tensorflow.distribute import experimental as e\ne.TPUStrategy\n", ABSENT["tensorflow.distribute.experimental.TPUStrategy"]),
])  # fmt: skip
def test_a_name_is_absent_under_each_of_its_spellings(code, reason):
    (mark,) = translate(TF + code).todos
    assert mark.sentence.endswith(reason)


def test_a_name_that_neither_has_is_marked_and_stays():
    found = translate(
        f"{TF}a = tf.distribute.Unheard\nb = tf.keras.layers.Unheard\nfrom tensorflow.keras.layers import Other\n"
    )
    assert "a = tf.distribute.Unheard\n" in found.after
    assert "b = tf.keras.layers.Unheard\n" in found.after
    names = ["tf.distribute.Unheard: Lockstep", "tf.keras.layers.Unheard: Keras 3", "tf.keras.layers.Other: Keras 3"]
    assert [mark.sentence.partition(" has no")[0] for mark in found.todos] == names


def test_a_name_that_the_program_gives_to_a_module_of_keras_is_followed():
    code = "B = tf.keras.backend\nD = tf.keras.layers\nB.square(1), B.floatx(), D.Unheard, D.Dense(3)\n"
    found = translate(TF + code)
    assert "B = keras.backend\nD = keras.layers\n" in found.after
    assert found.after.endswith("B.square(1), B.floatx(), D.Unheard, D.Dense(3)\n")
    assert [mark.sentence for mark in found.todos] == [
        "keras.backend.square: Keras 3 has no such name; there is keras.ops.square",
        "keras.layers.Unheard: Keras 3 has no such name",
    ]
    other = translate(f"{TF}B = tf.keras.backend\nB = other\nB.square(1)\n")
    assert [mark.sentence.partition(",")[0] for mark in other.todos] == [
        "B: the script also uses this name for something else"
    ]


# --- small things ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("m = tf.keras.Model.from_config(c)", "m = keras.Model.from_config(c)"),
        ("tf.random.set_seed(3)", "keras.utils.set_random_seed(3)"),
        ("tf.config.experimental.enable_op_determinism()", "lockstep.config.set_deterministic()"),
        ("s = tf.distribute.OneDeviceStrategy('/gpu:0')", "s = lockstep.MirroredStrategy(['/gpu:0'])"),
        ("s = tf.distribute.OneDeviceStrategy(device=name)", "s = lockstep.MirroredStrategy([name])"),
        ("m = tf.metrics.SparseCategoricalAccuracy()", "m = keras.metrics.SparseCategoricalAccuracy()"),
        ("s = tf.optimizers.schedules.CosineDecay(0.1, 9)", "s = keras.optimizers.schedules.CosineDecay(0.1, 9)"),
        ("o = tf.optimizers.Adam(lr=0.1)", "o = keras.optimizers.Adam(learning_rate=0.1)"),
        ("m = tf.keras.metrics.Mean()\nm.reset_states()", "m = keras.metrics.Mean()\nm.reset_state()"),
        ("l = tf.nn.scale_regularization_loss(tf.add_n(own))", "l = lockstep.scale_regularization_loss(sum(own))"),
        ("b = tf.keras.layers.experimental.SyncBatchNormalization()", "b = keras.layers.BatchNormalization(synchronized=True)"),
        (
            "b = tf.keras.layers.experimental.SyncBatchNormalization(axis=1)",
            "b = keras.layers.BatchNormalization(axis=1, synchronized=True)",
        ),
        (
            "b = tf.keras.layers.experimental.SyncBatchNormalization(\n axis=1,\n epsilon=(1e-5),  # small )\n)",
            "b = keras.layers.BatchNormalization(\n axis=1,\n epsilon=(1e-5), synchronized=True,  # small )\n)",
        ),
        ('print(f"{tf.keras.__version__}")', 'print(f"{keras.__version__}")'),
        ("l = tf.keras.layers.Dense(8, tf.nn.relu)", 'l = keras.layers.Dense(8, "relu")'),
        ("l = tf.keras.layers.Activation(tf.nn.swish)", 'l = keras.layers.Activation("swish")'),
        ("l = tf.keras.layers.GRU(8, recurrent_activation=tf.nn.sigmoid)", 'l = keras.layers.GRU(8, recurrent_activation="sigmoid")'),
        ("tf.keras.Model\nself.model.optimizer.lr", "keras.Model\nself.model.optimizer.learning_rate"),
        ("m = tf.keras.Sequential()\nm.optimizer.lr.assign(3)", "m = keras.Sequential()\nm.optimizer.learning_rate.assign(3)"),
        ("s.o = tf.keras.optimizers.SGD()\ns.o.lr = 3", "s.o = keras.optimizers.SGD()\ns.o.learning_rate = 3"),
        ("self.m = tf.keras.metrics.Mean()\nself.m.reset_states()", "self.m = keras.metrics.Mean()\nself.m.reset_state()"),
        (
            "class M(tf.keras.metrics.Metric):\n    def reset_states(self): ...\n    def f(self): self.reset_states()",
            "class M(keras.metrics.Metric):\n    def reset_state(self): ...\n    def f(self): self.reset_state()",
        ),
        (
            "class M(tf.keras.metrics.Metric):\n    def reset_states(self): ...\n    def reset_state(self): self.reset_states()",
            "class M(keras.metrics.Metric):\n    def reset_states(self): ...\n    def reset_state(self): self.reset_states()",
        ),
        ("l = tf.keras.layers.LSTM(3)\nl.reset_states()", "l = keras.layers.LSTM(3)\nl.reset_states()"),
        ("def f(keras):\n    return keras.Model\nm = tf.keras.Model", "def f(keras):\n    return keras.Model\nm = keras.Model"),
        ("o = tf.keras.optimizers.legacy.SGD(lr = 1, nesterov=True)", "o = keras.optimizers.SGD(learning_rate = 1, nesterov=True)"),
        ("o = tf.keras.optimizers.SGD(lr=  # lr\n 1)", "o = keras.optimizers.SGD(learning_rate=  # lr\n 1)"),
        ("c = tf.distribute.coordinator.ClusterCoordinator(s)", "c = lockstep.ClusterCoordinator(s)"),
        ("p = tf.distribute.experimental.partitioners.MinSizePartitioner()", "p = lockstep.experimental.partitioners.MinSizePartitioner()"),
        ("r = tf.distribute.cluster_resolver.SlurmClusterResolver()", "r = lockstep.cluster_resolver.SlurmClusterResolver()"),
    ],
)  # fmt: skip
def test_names_and_calls(before, after):
    assert new_lines(before) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import tensorflow.keras as k\nk.Model", "import keras as k\nk.Model"),
        ("import keras, numpy as np\nkeras.Model", "import keras, numpy as np\nkeras.Model"),
        ("from tensorflow import keras\nkeras.Model", "import keras\nkeras.Model"),
        ("from tensorflow.keras.layers import *\nDense", "from keras.layers import *\nDense"),
        (
            "from tensorflow.keras.callbacks import *\nfrom tensorflow.distribute import *\nMirroredStrategy(), TensorBoard, BackupAndRestore, CSVLogger",
            "from keras.callbacks import *\nfrom lockstep.callbacks import BackupAndRestore, TensorBoard\nfrom lockstep import *\n"
            "MirroredStrategy(), TensorBoard, BackupAndRestore, CSVLogger",
        ),
        (
            "from tensorflow.keras.callbacks import *\nfrom tensorflow.distribute import MirroredStrategy\nclass TensorBoard: pass\nMirroredStrategy",
            "from keras.callbacks import *\nfrom lockstep import MirroredStrategy\nclass TensorBoard: pass\nMirroredStrategy",
        ),
        ("from tensorflow.keras import layers as L, models\nL.Dense", "from keras import layers as L, models\nL.Dense"),
        ("from tensorflow import distribute as d\nd.MirroredStrategy", "import lockstep as d\nd.MirroredStrategy"),
        ("from tensorflow.distribute import MirroredStrategy\nMirroredStrategy", "from lockstep import MirroredStrategy\nMirroredStrategy"),
        (
            "from tensorflow.keras.callbacks import BackupAndRestore, CSVLogger\nimport lockstep\nlockstep.MirroredStrategy",
            "from lockstep.callbacks import BackupAndRestore\nfrom keras.callbacks import CSVLogger\nimport lockstep\nlockstep.MirroredStrategy",
        ),
        ("import tensorflow\ntensorflow.keras.Model", "import keras\nkeras.Model"),
        (
            "from tensorflow import distribute as dist, keras as K\ndist.MirroredStrategy, K.Model",
            "import lockstep as dist\nimport keras as K\ndist.MirroredStrategy, K.Model",
        ),
        (
            "import tensorflow as tf; import numpy as np\ntf.data, np",
            f"import tensorflow as tf\ntf{HIDDEN}import numpy as np\ntf.data, np",
        ),
        ("import tensorflow as tf, numpy as np\ntf.data", f"import tensorflow as tf, numpy as np\ntf{HIDDEN}tf.data"),
        ("import json, tensorflow as tf\ntf.data", f"import json, tensorflow as tf\ntf{HIDDEN}tf.data"),
        ("import tensorflow.data\ntensorflow.data", f"import tensorflow.data\ntensorflow{HIDDEN}tensorflow.data"),
        ("from tensorflow import data\ndata", f"from tensorflow import data\nimport tensorflow\ntensorflow{HIDDEN}data"),
        (
            "import tensorflow as tf\nfrom tensorflow import data\ntf.io, data",
            f"import tensorflow as tf\ntf{HIDDEN}from tensorflow import data\ntf.io, data",
        ),
        (
            "import tensorflow as tf\ntf.keras.utils.image_dataset_from_directory",
            f"import keras\nimport tensorflow\ntensorflow{HIDDEN}keras.utils.image_dataset_from_directory",
        ),
        (
            "from tensorflow import keras; import tensorflow_datasets as tfds\ntfds, keras",
            f"import tensorflow\ntensorflow{HIDDEN}import keras; import tensorflow_datasets as tfds\ntfds, keras",
        ),
        (
            "import tensorflow as tf; import tensorflow_datasets as tfds\ntfds",
            f"import tensorflow\ntensorflow{HIDDEN}import tensorflow_datasets as tfds\ntfds",
        ),
        ("import tf_keras as keras\nkeras.Model", "import keras\nkeras.Model"),
        ("import tf_keras\nimport tf_keras.layers\ntf_keras.Model", "import keras\nkeras.Model"),
        ("from tf_keras import layers\nlayers.Dense", "from keras import layers\nlayers.Dense"),
        ("import keras_tuner as kt\nfrom keras import layers\nkt, layers",) * 2,
        ("from keras_hub.models import Task\nimport tensorflow as tf\ntf.keras.Model", "import keras\nfrom keras_hub.models import Task\nkeras.Model"),
    ],
)  # fmt: skip
def test_imports(before, after):
    head = 'import os\n\nos.environ.setdefault("KERAS_BACKEND", "jax")  # Before Keras is imported.\n\n'
    assert translate(before).after == head + after
    assert translate(head + after).after == head + after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("keras = tf.keras\nkeras.optimizers.legacy.SGD\n", "\nimport keras\nkeras.optimizers.SGD\n"),
        ("M = tf.keras.Model\nkeras = tf.keras\n", "\nimport keras\nM = keras.Model\nimport keras\n"),
        ("def f():\n    keras = tf.keras\n    tf.keras.Model\n", "\ndef f():\n    import keras\n    keras.Model\n"),
    ],
)
def test_a_module_that_is_assigned_to_its_new_name_is_imported(before, after):
    found = translate(TF + before)
    assert found.after.endswith(after)
    assert translate(found.after) == replace(found, before=found.after)


def test_a_backend_that_the_script_sets_is_left_alone():
    code = 'import os\nos.environ["KERAS_BACKEND"] = "jax"\nimport tensorflow as tf\ntf.keras.Model\n'
    assert translate(code).after == 'import os\nos.environ["KERAS_BACKEND"] = "jax"\nimport keras\nkeras.Model\n'


@pytest.mark.parametrize("code", ["# Keras reads KERAS_BACKEND\n", "print('KERAS_BACKEND is not set')\n"])
def test_a_backend_that_the_script_only_speaks_of_is_set(code):
    assert 'os.environ.setdefault("KERAS_BACKEND", "jax")' in translate(f"{TF}{code}tf.keras.Model\n").after


def test_gpus_are_hidden_where_the_import_that_stays_is_in_a_block():
    code = (
        "try:\n    import tensorflow as tf\nexcept ImportError:\n    raise SystemExit\nd = tf.data.Dataset.range(3)\n"
    )
    found = translate(code).after
    assert f"    import tensorflow as tf\n    tf{HIDDEN}except" in found
    assert translate(found).after == found
    two = translate("def f():\n    import tensorflow as tf; import json\n    tf.data\n").after
    assert f"    import tensorflow as tf\n    tf{HIDDEN}    import json\n" in two
    assert translate("if 1: import tensorflow as tf; tf.data\n").after.endswith(
        "\nif 1: import tensorflow as tf; tf.data\n"
    )
    once = translate(f"def f():\n    import tensorflow as tf\n    tf.data\n{TF}tf.data\n").after
    assert once.count(HIDDEN) == 1
    assert f"\nimport tensorflow as tf\ntf{HIDDEN}tf.data\n" in once


@pytest.mark.parametrize("code", [
    "def f(sum):\n    return tf.add_n(losses)\n",
    "from numpy import *\ntf.add_n(losses)\n",
])  # fmt: skip
def test_a_sum_that_is_not_pythons_is_not_written(code):
    assert "tf.add_n(losses)" in translate(TF + code).after


def test_the_second_version_under_compat_is_translated_as_tensorflow():
    code = "import tensorflow.compat.v2 as tf\ns = tf.distribute.MirroredStrategy()\nm = tf.keras.Model()\n"
    found = translate(f"{code}l = tf.add_n(m.losses)\n")
    assert "s = lockstep.MirroredStrategy()\nm = keras.Model()\nl = sum(m.losses)\n" in found.after
    assert not found.todos
    data = translate(f"{code}tf.data\n")
    assert "import tensorflow.compat.v2 as tf\n" in data.after
    assert not data.todos
    assert new_lines("m = tf.compat.v2.keras.Model()") == "m = keras.Model()"


def test_an_import_inside_a_block_that_is_not_needed_any_more_leaves_the_block_whole():
    code = "def f():\n    import tensorflow as tf\nimport keras\nif 1: import tensorflow as tf\n"
    ast.parse(translate(code).after)


@pytest.mark.parametrize("before", ["def f():\n    ", "def f():\n    x = 1; ", "if 1: ", "try:\n\t"])
def test_an_import_that_becomes_two_stays_in_its_block(before):
    after = "\nexcept ImportError: pass" if before.startswith("try") else ""
    callbacks = f"from tensorflow.keras.callbacks import BackupAndRestore, CSVLogger{after}\n"
    found = translate(before + callbacks, with_strategy=True).after
    ast.parse(found)
    assert found.count("lockstep.callbacks import BackupAndRestore") == found.count("keras.callbacks import CSV") == 1


def test_what_a_function_imports_is_not_there_outside_of_it():
    outside, inside = (
        "m = tf.keras.Sequential()\n",
        "def f():\n    from tensorflow import keras\n    return keras.layers\n",
    )
    assert "\nimport keras\n" in translate(TF + inside + outside).after
    assert "\nimport keras\n" not in translate(TF + inside).after


def test_what_follows_on_the_line_stays_code():
    code = "tf.config.experimental.set_memory_growth(gpu, True); print(1)"
    assert translate(TF + code).after.endswith("\npass; print(1)")


def test_a_name_that_is_assigned_is_not_taken_for_a_module():
    code = "import tensorflow as tf\ntf = other\ntf.keras.Model\n"
    assert "tf.keras.Model" in translate(code).after


@pytest.mark.parametrize("code", [
    "d = d.map(f).cache().shuffle(9).batch(2)",  # in order already
    "d = d.shuffle(9).map(f).cache()",  # what is cached has been through f
    "d = d.batch(9).cache('file')",  # a file may have batches
])  # fmt: skip
def test_a_chain_that_is_right_or_means_something_else_is_left_alone(code):
    assert translate(TF + code).after.endswith(code)


@pytest.mark.parametrize("end", [
    "tf.keras.layers.Dense(3)",
    "tf.keras.layers.Dense(3, activation='relu')",
])  # fmt: skip
def test_logits_are_left_alone_where_no_softmax_is_at_the_end(end):
    code = f"m = tf.keras.Sequential([{end}])\nl = tf.keras.losses.BinaryCrossentropy(from_logits=True)\n"
    assert "from_logits=True" in translate(TF + code).after
    assert not translate(TF + code).todos


def test_the_softmax_of_a_part_of_a_model_is_not_its_end():
    part = "tf.keras.Sequential([tf.keras.layers.Dense(4, activation='softmax')])"
    net = f"class Net(tf.keras.Model):\n    def build(self, shape):\n        self.gate = {part}\n"
    found = translate(f"{TF}{net}l = tf.keras.losses.CategoricalCrossentropy(from_logits=True)\n")
    assert "from_logits=True" in found.after


def test_logits_of_two_models_are_marked_and_not_guessed():
    one = "tf.keras.Sequential([tf.keras.layers.Dense(3, activation='softmax')])\n"
    code = f"{TF}a = {one}b = {one}l = tf.keras.losses.CategoricalCrossentropy(from_logits=True)\n"
    found = translate(code)
    assert "from_logits=True" in found.after
    assert ["lockstep doctor" in mark.sentence for mark in found.todos] == [True]


ENDS_WITH = "m = tf.keras.Sequential([tf.keras.layers.Dense({}, activation={!r})])\n"
CLAIM = "l = tf.keras.losses.{}(from_logits=True)\n"
COMPILE = "m.compile('sgd', tf.keras.losses.{}(from_logits=True))\n"


@pytest.mark.parametrize("loss", ["BinaryCrossentropy", "CategoricalCrossentropy"])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_logits_are_mended_where_the_loss_has_its_own_activation_and_marked_where_it_has_another(activation, loss):
    """TensorFlow takes what is before either activation for either loss; only of its own is the loss of both forms the same."""
    found = translate(TF + ENDS_WITH.format(3, activation) + COMPILE.format(loss))
    if (activation, loss) in (("sigmoid", "BinaryCrossentropy"), ("softmax", "CategoricalCrossentropy")):
        assert "from_logits=False" in found.after
        assert not found.todos
    else:
        assert "from_logits=True" in found.after
        (mark,) = found.todos
        assert f"leave the {activation} out" in mark.sentence


@pytest.mark.parametrize("code", [
    "def loss(y, p):\n    return tf.keras.losses.categorical_crossentropy(y, p / 0.5, from_logits=True)\nm.compile('sgd', loss)\n",
    "net = imported.Net(m)\nnet" + COMPILE.format("CategoricalCrossentropy")[1:],
    "m = imported.Net(m)\n" + COMPILE.format("CategoricalCrossentropy"),
    CLAIM.format("CategoricalCrossentropy"),
])  # fmt: skip
def test_a_claim_of_logits_that_may_be_of_another_model_or_right_is_marked_and_not_mended(code):
    found = translate(TF + ENDS_WITH.format(3, "softmax") + code)
    assert "from_logits=True" in found.after
    assert ["write from_logits=False" in mark.sentence for mark in found.todos] == [True]


@pytest.mark.parametrize("code", [
    "m = tf.keras.Sequential()\nm.add(tf.keras.layers.Dense(3, activation='softmax'))\n",
    "def build():\n    m = tf.keras.Sequential([tf.keras.layers.Dense(3, activation='softmax')])\n    return m\nm = build()\n",
    "def build():\n    return tf.keras.Sequential([tf.keras.layers.Dense(3, activation='softmax')])\nm = build()\n",
])  # fmt: skip
def test_logits_are_mended_where_the_sequential_model_itself_is_compiled(code):
    found = translate(TF + code + COMPILE.format("CategoricalCrossentropy"))
    assert "from_logits=False" in found.after
    assert not found.todos


def test_a_claim_of_logits_without_its_name_is_found():
    code = (
        TF + ENDS_WITH.format(3, "softmax") + "m.compile('sgd', tf.keras.losses.SparseCategoricalCrossentropy(True))\n"
    )
    assert "SparseCategoricalCrossentropy(False)" in translate(code).after


@pytest.mark.parametrize("loss", ["BinaryCrossentropy", "CategoricalCrossentropy"])
@pytest.mark.parametrize("output", [
    "tf.keras.layers.Dense(3, activation='{}')(x)",
    "tf.keras.layers.Activation('{}')(x)",
    "tf.nn.{}(x)",
    "tf.keras.activations.{}(x)",
    "tf.keras.layers.Softmax()(x)",
    "tf.keras.layers.Dense(3)(x)",
])  # fmt: skip
def test_logits_of_a_model_of_its_own_class_are_marked(output, loss):
    """Neither this command nor the doctor sees where such a model ends."""
    activation = "sigmoid" if loss.startswith("Binary") else "softmax"
    output = output.format(activation)
    found = translate(
        f"{TF}class Net(tf.keras.Model):\n    def call(self, x):\n        return {output}\n{CLAIM.format(loss)}"
    )
    marked = [mark.sentence for mark in found.todos if "from_logits" in mark.sentence]
    write = "write from_logits=False" if activation in output.lower() else "leave the softmax out"
    assert [write in sentence for sentence in marked] == [True] * ("Dense(3)" not in output)


@pytest.mark.parametrize("model", [
    "m = tf.keras.Model(i, tf.keras.layers.Softmax()(x))\n",
    "m = tf.keras.Sequential([tf.keras.layers.Dense(3), tf.keras.layers.Softmax()])\n",
    "class Base(tf.keras.Model):\n    pass\nclass Net(Base):\n    def call(self, x):\n        return tf.nn.softmax(x)\n",
])  # fmt: skip
def test_logits_of_a_model_that_ends_with_a_softmax_of_another_form_are_marked(model):
    found = translate(TF + model + CLAIM.format("CategoricalCrossentropy"))
    assert ["write from_logits=False" in mark.sentence for mark in found.todos if "from_logits" in mark.sentence] == [
        True
    ]


@pytest.mark.parametrize("after", [
    "p = tf.nn.softmax(model(x)).numpy()\n",
    "q = tf.keras.Sequential([model, tf.keras.layers.Softmax()])\n",
    "p = tf.nn.sigmoid(model.predict(x))\n",
    "def attend(q, k, v):\n    return tf.matmul(tf.nn.softmax(tf.matmul(q, k)), v)\n",
])  # fmt: skip
@pytest.mark.parametrize("loss", ["BinaryCrossentropy", "CategoricalCrossentropy"])
def test_logits_of_which_a_program_makes_probabilities_are_not_marked(after, loss):
    model = "model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation='relu'), tf.keras.layers.Dense(3)])\n"
    found = translate(TF + model + CLAIM.format(loss) + after)
    assert "from_logits=True" in found.after
    assert not [mark.sentence for mark in found.todos if "from_logits" in mark.sentence]


def test_arguments_that_are_not_known_any_more_are_marked_and_those_with_a_new_name_get_it():
    code = "b = tf.keras.callbacks.BackupAndRestore(backup_dir='run', double_checkpoint=True)\n"
    found = translate(TF + ONE + code)
    assert "lockstep.callbacks.BackupAndRestore(directory='run', double_checkpoint=True)" in found.after
    (mark,) = found.todos
    assert mark.sentence.startswith("lockstep.callbacks.BackupAndRestore has no argument 'double_checkpoint'")
    options = "o = tf.distribute.InputOptions(experimental_fetch_to_device=False)\n"
    assert ["experimental_fetch_to_device" in mark.sentence for mark in translate(TF + options).todos] == [True]


@pytest.mark.parametrize(
    ("call", "argument", "advice"),
    [
        ("layers.BatchNormalization(fused=True, momentum=0.9)", "fused", "leave it out"),
        ("layers.LSTM(4, time_major=True, zero_output_for_mask=True)", "time_major", "leave it out"),
        ("layers.Dropout(0.1, input_shape=(3,), dynamic=True)", "dynamic", "leave it out"),
        ("layers.LSTM(4, batch_input_shape=(1, 5, 3), stateful=True)", "batch_input_shape", "keras.Input(batch_shape="),
        ("optimizers.Adam(0.1, gradient_transformers=[f])", "gradient_transformers", "leave it out"),
    ],
)
def test_arguments_that_a_layer_or_an_optimizer_would_refuse_only_when_it_runs_are_marked(call, argument, advice):
    (mark,) = translate(f"{TF}x = tf.keras.{call}\n").todos
    assert f"has no argument {argument!r}: " in mark.sentence
    assert advice in mark.sentence


@pytest.mark.parametrize("call", [
    "layers.Dense(3, input_shape=(2,), trainable=False, dtype='float32', activity_regularizer='l2', name='a')",
    "layers.Embedding(10, 3, input_length=4, mask_zero=True)",
    "layers.LeakyReLU(alpha=0.2)",
    "layers.GRU(3, implementation=1, dropout=0.1)",
    "layers.InputLayer(batch_input_shape=(2, 3))",
    "layers.TextVectorization(10, vocabulary_size=3)",
    "optimizers.SGD(learning_rate=0.1, clipnorm=1.0)",
    "Model(inputs=a, outputs=b, name='m')",
    "layers.Dense(**options)",
])  # fmt: skip
def test_arguments_that_keras_takes_besides_those_of_its_signatures_are_not_marked(call):
    assert not translate(f"{TF}x = tf.keras.{call}\n").todos


@pytest.mark.parametrize("code", [
    "from tensorflow.keras.callbacks import BackupAndRestore, TensorBoard\nBackupAndRestore(backup_dir='run'), TensorBoard('logs')\n",
    "tf.keras.callbacks.experimental.BackupAndRestore('run')\ntf.distribute.get_strategy()\n",
])  # fmt: skip
def test_callbacks_stay_those_of_keras_where_no_file_names_a_strategy(code, tmp_path):
    found = translate(TF + code)
    assert "lockstep.callbacks" not in found.after
    assert "keras.callbacks.experimental" not in found.after
    assert "backup_dir" in found.after or "backup_dir" not in code
    assert translate(found.after) == replace(found, before=found.after, todos=())
    (tmp_path / "parts.py").write_text(TF + code)
    (tmp_path / "main.py").write_text(f"import parts\n{TF}{ONE}")
    parts, _ = migrate([str(tmp_path / name) for name in ("parts.py", "main.py")])
    assert "lockstep.callbacks" in parts.after
    assert "backup_dir" not in parts.after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("d = d.shuffle(9).cache()", "d = d.cache().shuffle(9, reshuffle_each_iteration=False)"),
        ("d = d.shuffle(n, 4).batch(2).cache()", "d = d.cache().shuffle(n, 4, reshuffle_each_iteration=False).batch(2)"),
        ("d = d.shuffle(n, 4, True).cache()", "d = d.cache().shuffle(n, 4, False)"),
        ("d = d.shuffle(9, reshuffle_each_iteration=r).cache()", "d = d.cache().shuffle(9, reshuffle_each_iteration=False)"),
        ("d = d.shuffle(9, **more).cache()", "d = d.shuffle(9, **more).cache()"),
        ("d = d.shuffle(*size).cache()", "d = d.shuffle(*size).cache()"),
        ("d = d.batch(2).prefetch(1).cache().take(1)", "d = d.cache().batch(2).prefetch(1).take(1)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("below", ["", "\nval, train = d.take(2), d.skip(2)", "\nd.shard(2, 0)"])
def test_a_cache_before_a_shuffle_keeps_the_order_of_its_first_pass(before, after, below):
    """Splits, in this file or another, and labels that are read apart from predictions need one order."""
    found = translate(f"{TF}tf.data\n{before}{below}\n")
    assert found.after.endswith(f"{after}{below}\n")
    assert not found.todos
    assert translate(found.after).after == found.after


@pytest.mark.parametrize("code", [
    'tf.config.set_visible_devices([], "GPU")\n',
    'tf.config.set_visible_devices(gpus[0], "GPU")\n',
    'from tensorflow.config import set_visible_devices\nset_visible_devices([], "GPU")\n',
])  # fmt: skip
def test_devices_that_the_program_hides_are_marked_and_those_that_the_translation_hides_are_not(code):
    found = translate(TF + code)
    assert found.after.count(HIDDEN) == 1
    assert found.todos
    assert all("JAX_PLATFORMS=cpu" in mark.sentence for mark in found.todos)
    assert translate(found.after) == replace(found, before=found.after)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("test.is_gpu_available", "jax.local_devices()"),
        ("test.gpu_device_name", "jax.local_devices()"),
        ("test.is_built_with_cuda", "jax.local_devices()"),
        ("debugging.enable_check_numerics", "lockstep.callbacks.NanGuard"),
        ("debugging.set_log_device_placement", "leave it out"),
        ("config.run_functions_eagerly", "run_eagerly=True"),
        ("config.threading.set_intra_op_parallelism_threads", "JAX sets its threads"),
        ("profiler.experimental.start", "jax.profiler"),
        ("tpu.experimental.initialize_tpu_system", "JAX finds its TPUs"),
    ],
)
def test_what_tensorflow_would_say_or_do_about_devices_is_marked(name, advice):
    (mark,) = translate(f"{TF}x = tf.{name}()\n").todos
    assert advice in mark.sentence


def test_logical_gpus_of_another_gpu_than_the_first_are_marked():
    code = "g = tf.config.list_physical_devices('GPU')\ntf.config.set_logical_device_configuration(g[{}], [C(), C()])\n"
    first = translate(TF + code.format(0) + ONE).after
    assert "pass  # The strategy has all replicas on gpu:0, and uses no other GPU.\n" in first
    other = translate(TF + code.format(1) + ONE)
    assert "lockstep.MirroredStrategy()" in other.after
    assert any("lockstep.MirroredStrategy(['gpu:1'], replicas=2)" in mark.sentence for mark in other.todos)


LIMIT = "[tf.config.LogicalDeviceConfiguration({})]"
GPUS = "gpus = tf.config.list_physical_devices('GPU')\n"


@pytest.mark.parametrize("configuration", [LIMIT.format("memory_limit=1024"), LIMIT.format("1024")])
@pytest.mark.parametrize("code", [
    "tf.config.set_logical_device_configuration(gpus[0], {})\n",
    "tf.config.experimental.set_virtual_device_configuration(gpus[1], {})\n",
    "for gpu in gpus:\n    tf.config.set_logical_device_configuration(gpu, {})\n",
    "tf.config.set_logical_device_configuration(gpus[0], {0})\ntf.config.set_logical_device_configuration(gpus[1], {0})\n",
])  # fmt: skip
def test_a_limit_of_the_memory_of_gpus_leaves_the_strategy_all_of_them(code, configuration):
    found = translate(TF + GPUS + code.format(configuration) + ONE)
    assert "s = lockstep.MirroredStrategy()\n" in found.after
    lines = [line for line in found.after.splitlines() if "pass  # On JAX" in line]
    assert len(lines) == code.count("{") == sum("XLA_PYTHON_CLIENT_MEM_FRACTION" in line for line in lines)
    assert [mark.sentence.partition(":")[0] for mark in found.todos] == ["tf.config.list_physical_devices"]


def test_one_logical_gpu_without_a_limit_is_marked_and_leaves_the_strategy_as_it_is():
    code = f"tf.config.set_logical_device_configuration(gpus[0], {LIMIT.format('')})\n"
    found = translate(TF + GPUS + code + ONE)
    assert "s = lockstep.MirroredStrategy()\n" in found.after
    assert "tf.config.set_logical_device_configuration" in [mark.sentence.partition(":")[0] for mark in found.todos]


def test_logical_cpus():
    code = """cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
"""
    assert "\nlockstep.config.set_logical_cpu_devices(4)\n" in translate(TF + code).after


def test_logical_devices_whose_number_is_not_written_are_marked():
    code = "tf.config.set_logical_device_configuration(one, configurations)\n"
    assert translate(TF + code).todos


def test_letters_that_take_several_bytes_do_not_shift_anything():
    code = 'print("Größe: 🙂", tf.keras.Model, "é"); tf.random.set_seed(1)'
    assert new_lines(code) == 'print("Größe: 🙂", keras.Model, "é"); keras.utils.set_random_seed(1)'


def sentences(code):
    return [mark.sentence for mark in translate(code).todos]


@pytest.mark.parametrize("code", [
    "try:\n    import tensorflow as tf\nexcept ImportError:\n    tf = None\ns = tf.distribute.MirroredStrategy()\n",
    "import tensorflow as tf\nif old:\n    import torch as tf\ntf.keras.Model\n",
    "from tensorflow import keras\nclass keras: pass\nkeras.layers.experimental.preprocessing\n",
])  # fmt: skip
def test_an_import_whose_name_may_stand_for_something_else_is_marked(code):
    name = "keras" if "class" in code else "tf"
    (sentence,) = sentences(code)
    assert sentence.startswith(f"{name}: the script also uses this name for something else")
    used = code.splitlines()[-1]
    assert used in translate(code).after


@pytest.mark.parametrize(("name", "code"), [
    ("keras", "def f(keras):\n    return tf.keras.Model\n"),
    ("keras", "keras = other\ndef f():\n    return tf.keras.Model\n"),
    ("keras", "class C:\n    keras = other\n    m = tf.keras.Model\n"),
    ("keras", "from tensorflow.keras import layers as keras\nm = tf.keras.Model\n"),
    ("lockstep", "def f(lockstep=1):\n    return tf.distribute.MirroredStrategy()\n"),
])  # fmt: skip
def test_a_name_whose_translation_means_something_else_there_stays_and_is_marked(name, code):
    found = translate(TF + code)
    assert code.splitlines()[-1] in found.after
    assert f"import {name}\n" not in found.after
    (mark,) = found.todos
    assert mark.sentence.startswith(f"{name}: the script also uses this name for something else")
    assert translate(found.after) == replace(found, before=found.after)


@pytest.mark.parametrize("code", [
    'f"{tf.distribute.OneDeviceStrategy(name)} {tf.keras.losses.Reduction.NONE}"',
    'f"{tf.keras.layers.Dense(3, activation=tf.nn.relu)}"',
])  # fmt: skip
def test_words_are_not_written_into_a_text_whose_quotes_they_could_end(code):
    found = translate(f"{TF}{code}\n")
    assert found.after.splitlines()[-1].count('"') == 2
    (mark,) = found.todos
    assert mark.sentence.startswith(("tf.keras.losses.Reduction.NONE: ", "tf.nn.relu: "))


def test_a_rule_whose_result_is_no_python_changes_nothing_and_is_marked(monkeypatch):
    def spoil(source, bindings):
        """Rewrite nothing well."""
        return [Edit(source.text.index("tf.data"), source.text.index("tf.data"), "(")]

    monkeypatch.setattr(translate_module, "RULES", (spoil, *translate_module.RULES))
    code = f"{TF}tf.keras.Model\nprint(\n    tf.data,\n)\n"
    found = translate(code)
    (mark,) = found.todos
    assert mark.sentence.endswith("do it by hand, and remove this comment: Rewrite nothing well.")
    assert found.after.splitlines()[mark.line - 1] == "print("
    assert f"keras.Model\n# lockstep migrate: {mark.sentence}\nprint(" in found.after
    assert translate(found.after) == replace(found, before=found.after)


def test_any_number_of_comments_on_a_statement_is_written_once():
    code = "o = tf.keras.Model(tf.Variable(1), tf.function(f), tf.GradientTape(), tf.device('x'), tf.estimator.X)\n"
    found = translate(TF + code)
    assert len(found.todos) == 5
    assert translate(found.after) == replace(found, before=found.after)


def test_a_name_that_a_function_has_for_itself_is_not_taken_for_a_module():
    code = "def f(tf):\n    return tf.keras\ndef g():\n    layers = []\n    return layers.index\n"
    head = "import tensorflow as tf\nfrom tensorflow.keras import layers\n"
    found = translate(f"{head}{code}m = tf.keras.Model\nd = layers.Dense\n")
    assert code in found.after
    assert found.after.endswith("m = keras.Model\nd = layers.Dense\n")
    assert not found.todos


def test_the_backend_is_chosen_before_an_import_within_a_block():
    code = "try:\n    from tensorflow import keras\nexcept ImportError:\n    import keras\nkeras.Model\n"
    found = translate(code)
    assert not found.todos
    assert found.after.index("KERAS_BACKEND") < found.after.index("import keras")
    assert translate(found.after).after == found.after


@pytest.mark.parametrize("before", ["import os\n", "import json, os, sys\n", "import os; import keras_tuner\n"])
def test_os_is_imported_once(before):
    after = translate(f"{before}{TF}tf.keras.Model\n").after
    assert after.count("import os") == before.count("import os")
    assert after.index("os") < after.index("os.environ")


@pytest.mark.parametrize("code", [
    "from tensorflow.keras.mixed_precision import experimental as mp\nmp.unheard\n",
    "from tensorflow.keras.unheard import thing\nthing\n",
    "import tensorflow.keras.unheard as thing\nthing\n",
    "from tensorflow.unheard import thing\nthing.other\n",
])  # fmt: skip
def test_a_module_that_is_nowhere_stays(code):
    assert code.splitlines()[-1] in translate(code).after


@pytest.mark.parametrize(
    ("name", "word"), [("NONE", "none"), ("SUM", "sum"), ("SUM_OVER_BATCH_SIZE", "sum_over_batch_size")]
)
def test_reductions_of_losses_are_words(name, word):
    code = f"l = tf.keras.losses.MeanSquaredError(reduction=tf.keras.losses.Reduction.{name})"
    assert new_lines(code) == f'l = keras.losses.MeanSquaredError(reduction="{word}")'


def test_a_comment_stays_where_it_is_when_the_cache_comes_first():
    code = "d = (d.shuffle(9)\n      .prefetch(2)  # read ahead\n      .cache())\n"
    assert translate(TF + code).after.endswith(
        "d = (d.cache().shuffle(9, reshuffle_each_iteration=False)\n      .prefetch(2)  # read ahead\n      )\n"
    )


@pytest.mark.parametrize(("code", "word"), [
    ("class M(tf.keras.Model):\n    def call(self, x):\n        return tf.square(x)\n", "tf.square: "),
    ("m = tf.keras.layers.Lambda(lambda x: tf.nn.relu(x))\n", "tf.nn.relu: "),
])  # fmt: skip
def test_functions_of_tensorflow_within_a_model_are_marked(code, word):
    (sentence,) = sentences(TF + code)
    assert sentence.startswith(word)
    assert "keras.ops" in sentence


def test_functions_of_tensorflow_elsewhere_may_be_for_its_data():
    assert not sentences(
        f"{TF}def scale(x):\n    return tf.cast(x, tf.float32)\nd = tf.data.Dataset.range(3).map(scale)\n"
    )


@pytest.mark.parametrize("code", [
    "o = tf.keras.optimizers.Adam(decay=1e-6)",
    "tf.keras.Model().fit(x, workers=4)",
    "tf.keras.Model().fit_generator(x)",
    "tf.keras.Model().save('m', save_format='tf')",
    "tf.keras.utils.experimental.DatasetCreator(f)",
    "l = tf.keras.layers.Dense(3, tf.math.tanh)",
    "dict(zip(model.metrics_names, model.evaluate(x)))",
    "model.predict_classes(x)",
    "print(accuracy.result().numpy())",
    "total = strategy.run(step, args=(x,))\nprint(total.numpy())",
    "print(strategy.reduce('SUM', losses, axis=None).numpy())",
    "def step(x):\n    return strategy.reduce(lockstep.ReduceOp.SUM, x, axis=None)\nprint(step(x).numpy())",
    "self.add_metric(loss, name='loss')",
    "net.save_weights('w.weights.h5', save_format='h5')",
    "tf.keras.models.save_model(m, 'm.keras', save_format='tf')",
    "model.compile('sgd', experimental_run_tf_function=False)",
    "print(logs.get('lr'))",
    "print(history.history['lr'])",
    "if hasattr(self.model.optimizer, 'lr'): pass",
    "self.add_weight('w', shape=(3,))",
    "tf.keras.backend.set_floatx('float64')",
    "l = tf.keras.layers.Dense(3, dtype='float64')",
    "np.random.seed(42)\ntf.random.set_seed(1)",
    "for epoch in epochs:\n    tf.random.set_seed(epoch)",
    "path = 'm' if is_chief else 'temporary'\nmodel.save(path)",
    "path = 'm.keras' if is_chief else 'temporary'\nmodel.save(path)",
    "print(net.optimizer.lr)",
    "def f(optimizer):\n    optimizer.lr = 0.01",
    "self.gen_optimizer.lr = 0.01",
    "self.optim.lr.assign(0.01)",
    "for m in metrics:\n    m.reset_states()",
    "model = tf.keras.Sequential()\nmodel.reset_states()",
    "c = tf.keras.callbacks.ModelCheckpoint('ckpt_{epoch}', save_weights_only=True)",
    "c = tf.keras.callbacks.ModelCheckpoint('best.h5', 'loss', 0, True, True)",
    "c = tf.keras.callbacks.ModelCheckpoint(filepath=f'{d}/best')",
    "import os\np = os.path.join(d, 'ckpt_{epoch}')\nc = tf.keras.callbacks.ModelCheckpoint(p, save_weights_only=True)",
    "model.save('saved_model/')",
    "m = tf.keras.Sequential()\nm.save(folder / 'm')",
    "tf.keras.Model\nnet.compile('sgd')\nnet.save('m/')",
    "tf.keras.models.save_model(m, 'saved')",
    "m = tf.keras.models.load_model('saved_model/')",
    "net.save_weights(folder + 'w.h5')",
    "net.load_weights('w')",
    "p = tf.keras.utils.get_file('a', origin=u, untar=True)",
    "p = tf.keras.utils.get_file('a', u, is_tar)",
    "p = tf.keras.utils.get_file('a.zip', u, extract=True)",
])  # fmt: skip
def test_what_keras_3_does_not_take_any_more_is_marked(code):
    (sentence,) = sentences(TF + code)
    assert ": " in sentence or "no argument" in sentence


@pytest.mark.parametrize("code", [
    "l = tf.keras.layers.Dense(3, tf.keras.activations.relu)",
    "o = tf.keras.optimizers.SGD(cfg.optimizer.lr)",
    "o = tf.keras.optimizers.SGD(args.opt.lr)",
    "path = 'm.keras' if is_chief else folder + 'temporary.keras'\nmodel.save(path)",
    "rows = dataset.reduce(np.int64(0), count).numpy()",
    "def f():\n    return f()\nf().numpy()",
    "print(model.weights[0].numpy(), tf.gather([1], 0).numpy())",
    "logs['lr'] = 3",
    "tf.keras.backend.set_floatx('float32')\nx = np.zeros(3, 'float64')",
    "jax.config.update('jax_enable_x64', True)\ntf.keras.backend.set_floatx('float64')",
    "np.random.seed(1)\nrandom.seed(1)\ntf.random.set_seed(1)",
    "tf.random.set_seed(1)\nnp.random.seed(42)",
    "self.add_weight(name='w', shape=(3,))",
    "o = tf.keras.optimizers.SGD(config['lr'])",
    "o = tf.keras.optimizers.SGD(config.get('lr', 0.1))",
    "o = tf.keras.optimizers.SGD(opt.lr)",
    "class Game:\n    def reset_states(self): pass\nGame().reset_states()",
    "c = tf.keras.callbacks.ModelCheckpoint('{epoch}.weights.h5', save_weights_only=True)",
    "c = tf.keras.callbacks.ModelCheckpoint(sys.argv[1], save_weights_only=True)",
    "c = tf.keras.callbacks.ModelCheckpoint(f'{name}', save_weights_only=True)",
    "c = tf.keras.callbacks.ModelCheckpoint('best.keras', save_weights_only=is_small)",
    "p = 'a'\np = 'b.weights.h5'\nc = tf.keras.callbacks.ModelCheckpoint(p, save_weights_only=True)",
    "model.save('m.keras')\nfigure.save('figure')\nnp.save('rows', x)",
    "p = tf.keras.utils.get_file('a.zip', u, False, extract=False)",
    "m = tf.keras.models.load_model('m.h5')\nm.load_weights('w.h5')\nm.save_weights('w.weights.h5')",
])  # fmt: skip
def test_what_keras_3_accepts_is_not_marked(code):
    assert not sentences(TF + code)


def test_each_ending_that_is_accepted_is_one_of_keras(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    for ending in ("", *{ending for endings in WRITTEN.values() for ending in endings}):
        for method in ("save", "save_weights"):
            try:
                getattr(model, method)(str(tmp_path / f"m{ending}"))
                is_accepted = True
            except ValueError:
                is_accepted = False
            assert is_accepted == ending.endswith(WRITTEN[method])
        for weights_only in (False, True):
            try:
                keras.callbacks.ModelCheckpoint(f"m{ending}", save_weights_only=weights_only)
                is_accepted = True
            except ValueError:
                is_accepted = False
            assert is_accepted == ending.endswith((".weights.h5",) if weights_only else WRITTEN["ModelCheckpoint"])


def test_another_backend_that_the_script_sets_is_marked():
    code = 'import os\nos.environ["KERAS_BACKEND"] = "tensorflow"\nimport keras\n'
    (sentence,) = sentences(code)
    assert sentence.startswith('KERAS_BACKEND: write "jax"')


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_shows_the_difference_and_writes_only_when_told(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_bytes(b"import tensorflow as tf\r\ns = tf.distribute.MirroredStrategy()\r\n")
    path.chmod(0o755)
    before = path.read_bytes()
    assert cli.main(["migrate", str(path)]) == 0
    shown = capsys.readouterr()
    changed = {line for line in shown.out.splitlines() if line[:1] in "+-" and "import" not in line}
    assert changed >= {"-s = tf.distribute.MirroredStrategy()", "+s = lockstep.MirroredStrategy()"}
    assert "--write changes the file; nothing left to do by hand" in shown.err
    assert path.read_bytes() == before
    assert cli.main(["migrate", str(path), "--write"]) == 0
    assert path.read_bytes().endswith(b"import lockstep\r\ns = lockstep.MirroredStrategy()\r\n")
    assert path.stat().st_mode & 0o777 == 0o755
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]
    capsys.readouterr()
    assert cli.main(["migrate", str(path)]) == 0
    assert capsys.readouterr().err == f"{path}: nothing to translate\n"


def test_what_is_left_to_do_by_hand_is_said_again(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(f"{TF}tf.GradientTape()\n")
    for _ in range(2):
        assert cli.main(["migrate", str(path), "--write"]) == 1
    said = capsys.readouterr().err
    assert f"{path}: written; 1 left to do by hand" in said
    assert f"{path}: nothing to translate; 1 left to do by hand" in said


def test_the_difference_has_the_lines_of_the_file(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(f'{TF}\x0c\nx = "\x85"\ntf.keras.Model\n')
    cli.main(["migrate", str(path)])
    shown = capsys.readouterr().out
    assert " \x0c\n" in shown
    assert "No newline" not in shown


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path, capsys, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text(f"{TF}tf.keras.Model\n")

    def refuse(*_):
        raise PermissionError("not here")

    monkeypatch.setattr(os, "replace", refuse)
    assert cli.main(["migrate", str(path), "--write"]) == 2
    assert "The file is unchanged" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


def test_what_is_left_gives_the_exit_code_1(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(f"{TF}with tf.GradientTape() as tape:\n    pass\n")
    assert cli.main(["migrate", str(path), "--write"]) == 1
    assert "jax.value_and_grad" in capsys.readouterr().err
    assert "# lockstep migrate: tf.GradientTape: " in path.read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"print 3\n", "train.py, line 1: "), (b"\xff\xfe", ": cannot be read: "), (None, ": cannot be read: ")],
)
def test_what_is_no_program_is_refused_and_stays(tmp_path, capsys, content, message):
    path = tmp_path / "train.py"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["migrate", str(path), "--write"]) == 2
    assert message in capsys.readouterr().err
    assert content is None or path.read_bytes() == content


def test_none_of_several_files_is_changed_where_one_is_no_program(tmp_path, capsys):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(f"{TF}tf.keras.Model\n")
    bad.write_text("print 3\n")
    assert cli.main(["migrate", "--write", str(good), str(bad)]) == 2
    assert good.read_text() == f"{TF}tf.keras.Model\n"
    assert cli.main(["migrate", "--write", str(good)]) == 0
    assert "import keras" in good.read_text()


def test_syntax_is_refused_with_its_line():
    with pytest.raises(OptionError, match=r"script\.py, line 2: "):
        translate("import keras\nx = (\n")


# --- the page --------------------------------------------------------------------------------------------------------


# What has the same name and is not quite the same.
SAME_NAME = (
    *("InputOptions", "cluster_resolver.SlurmClusterResolver", "cluster_resolver.KubernetesClusterResolver"),
    *("get_strategy", "has_strategy", "get_replica_context", "in_cross_replica_context"),
    *("DistributedDataset", "InputContext", "ReplicaContext", "cluster_resolver.ClusterResolver"),
    *("cluster_resolver.SimpleClusterResolver", "cluster_resolver.TFConfigClusterResolver"),
)


def rows_of_the_page():
    """Name of TensorFlow, and what the page says of it: same, different or absent."""
    names, _, _ = PAGE.partition("## Coming from keras.distribution")
    for first, second in re.findall(r"^\| (`.*?) \| (same|different|absent) \|", names, flags=re.MULTILINE):
        for name in re.findall(r"`([\w.]+)`", first):
            yield name, second


def full(name):
    return name.replace("tf.", "tensorflow.", 1) if name.startswith("tf.") else f"tensorflow.distribute.{name}"


@pytest.mark.parametrize(("name", "what"), [row for row in rows_of_the_page() if row[0] != "TF_CONFIG"])
def test_the_page_says_what_is_so(name, what):
    is_method = name[0].islower() and "." not in name and not exists(f"lockstep.{name}")
    if is_method and not why_absent(full(name)):
        methods = {*dir(lockstep.MirroredStrategy), *dir(lockstep.MultiWorkerMirroredStrategy), *STRATEGY_METHODS}
        assert (name in methods) == (what != "absent")
        return
    becomes = translated(full(name))
    is_same = becomes == f"lockstep.{name}" and exists(becomes)
    assert is_same == (what == "same" or name in SAME_NAME)
    if what == "different":
        rest = "\n".join(line for line in PAGE.splitlines() if f"`{name}`" in line)
        assert becomes in rest or "set_" in name or name in SAME_NAME, becomes
    if what == "absent":
        assert why_absent(full(name)) or not exists(becomes)


def test_each_name_that_is_translated_or_absent_is_on_the_page():
    told = {full(name) for name, _ in rows_of_the_page()}
    for name in {*RENAMED, *ABSENT}:
        if name.startswith("tensorflow.distribute."):
            assert any(name == one or one.startswith(f"{name}.") for one in told), name


# --- what Keras 3 and several workers need ---------------------------------------------------------------------------

NUMPY = "import numpy as np\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("l = tf.keras.layers.Embedding(np.max(x) + 1, 16)", "l = keras.layers.Embedding(int(np.max(x) + 1), 16)"),
        ("l = tf.keras.layers.Dense(y.max(), name='a')", "l = keras.layers.Dense(int(y.max()), name='a')"),
        ("n = np.prod(s)\nl = tf.keras.layers.Dense(units=n)", "n = np.prod(s)\nl = keras.layers.Dense(units=int(n))"),
        ("n = np.array([3])\nl = tf.keras.layers.Dense(n[0])", "n = np.array([3])\nl = keras.layers.Dense(int(n[0]))"),
        ("n = np.array([3])[0]\nl = tf.keras.layers.Dense(n)", "n = np.array([3])[0]\nl = keras.layers.Dense(int(n))"),
        ("n = x.shape[1]\nl = tf.keras.layers.Dense(n)", "n = x.shape[1]\nl = keras.layers.Dense(n)"),
        ("n = len(x)\nl = tf.keras.layers.Dense(n)", "n = len(x)\nl = keras.layers.Dense(n)"),
        ("n = int(x.max())\nl = tf.keras.layers.Dense(n)", "n = int(x.max())\nl = keras.layers.Dense(n)"),
        ("l = tf.keras.layers.Dense(3, bias_initializer=np.max(x))", "l = keras.layers.Dense(3, bias_initializer=np.max(x))"),
        ("l = tf.keras.layers.Conv2D(np.int64(3), 3)", "l = keras.layers.Conv2D(np.int64(3), 3)"),
    ],
)  # fmt: skip
def test_integers_of_numpy_become_pythons_where_keras_takes_no_others(before, after):
    assert new_lines(f"{NUMPY}{before}") == f"{NUMPY}{after}"


def test_each_layer_of_that_table_refuses_integers_of_numpy():
    for name, arguments in _SIZES.items():
        usual = dict.fromkeys(arguments, 4)
        getattr(keras.layers, name)(**usual)
        for argument in arguments:
            if (name, argument) != ("MultiHeadAttention", "key_dim"):
                with pytest.raises((TypeError, ValueError)):
                    getattr(keras.layers, name)(**usual | {argument: np.int64(4)})


SEVERAL = "strategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
CONFIG = 'c = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}\n'


def test_a_task_that_is_written_in_the_program_becomes_a_default():
    code = f'import os, json\n{CONFIG}os.environ["TF_CONFIG"] = json.dumps(c)\n'
    found = translate(TF + code + SEVERAL)
    assert 'os.environ.setdefault("TF_CONFIG", json.dumps(c))  # lockstep run sets it for each worker.\n' in found.after
    assert not found.todos
    assert translate(found.after).after == found.after
    from_outside = TF + code.replace('"index": 0', '"index": int(sys.argv[1])') + SEVERAL
    assert 'os.environ["TF_CONFIG"] = json.dumps(c)' in translate(from_outside).after


SET_TASK = 'os.environ["TF_CONFIG"] = json.dumps(c)\n'


@pytest.mark.parametrize("code", [
    f"{CONFIG}{SET_TASK}start()\nc['task']['index'] = 1\n{SET_TASK}start()\n",
    f"{CONFIG}for c['task']['index'] in range(2):\n    {SET_TASK}    start()\n",
    f"{CONFIG}while c['task']['index'] < 2:\n    {SET_TASK}    start()\n",
    f"{CONFIG}def worker(i):\n    c['task']['index'] = i\n    {SET_TASK}    start()\nworker(0), worker(1)\n",
])  # fmt: skip
def test_a_program_that_sets_a_task_for_each_worker_that_it_starts_keeps_that_and_is_marked(code):
    found = translate(f"{TF}import os, json\n{code}{SEVERAL}")
    assert found.after.count(SET_TASK) == code.count(SET_TASK)
    assert "setdefault('TF_CONFIG'" not in found.after.replace('"', "'")
    assert len(found.todos) == code.count(SET_TASK)
    assert all("lockstep run -n 2 train.py" in mark.sentence for mark in found.todos)
    assert translate(found.after) == replace(found, before=found.after)


@pytest.mark.parametrize("code", [
    f"def main():\n    {CONFIG}    {SET_TASK}main()\n",
    f"{CONFIG}def main():\n    {SET_TASK}main()\n",
])  # fmt: skip
def test_a_task_that_a_function_sets_becomes_a_default(code):
    found = translate(f"{TF}import os, json\n{code}{SEVERAL}")
    assert 'os.environ.setdefault("TF_CONFIG", json.dumps(c))' in found.after
    assert not found.todos


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("d = d.shuffle(60000).repeat()", "d = d.shuffle(60000, seed=1).repeat()"),
        ("d = d.shuffle(\n    60000,\n)", "d = d.shuffle(\n    60000, seed=1,\n)"),
        ("d = d.shuffle(\n    60000,  # rows\n)", "d = d.shuffle(\n    60000, seed=1,  # rows\n)"),
        ("d = d.shuffle(\n    60000  # rows, in (all)\n)", "d = d.shuffle(\n    60000, seed=1  # rows, in (all)\n)"),
        ("d = d.shuffle(buffer_size=(n))", "d = d.shuffle(buffer_size=(n), seed=1)"),
        ("d = d.shuffle(buffer_size=n)", "d = d.shuffle(buffer_size=n, seed=1)"),
        ("d = tf.data.Dataset.range(9).map(f).shuffle(len(x))", "d = tf.data.Dataset.range(9).map(f).shuffle(len(x), seed=1)"),
        ("d = d.shuffle(60000, seed=4)", "d = d.shuffle(60000, seed=4)"),
        ("d = d.shuffle(60000, 4)", "d = d.shuffle(60000, 4)"),
        ("np.random.shuffle(x)", "np.random.shuffle(x)"),
        ("d = d.shuffle(9, reshuffle_each_iteration=False)", "d = d.shuffle(9, reshuffle_each_iteration=False, seed=1)"),
        ("t = utils.shuffle(t, random_state=0)", "t = utils.shuffle(t, random_state=0)"),
        ("rng.shuffle(x, axis=1)", "rng.shuffle(x, axis=1)"),
    ],
)  # fmt: skip
def test_workers_shuffle_alike(before, after):
    assert after in translate(TF + SEVERAL + before).after
    assert not translate(TF + SEVERAL + before).todos
    alone = translate(f"{TF}strategy = tf.distribute.MirroredStrategy()\n{before}").after
    assert before in alone


def test_what_may_be_a_data_set_is_marked():
    (mark,) = translate(f"{TF}{SEVERAL}d = given.shuffle(n)\n").todos
    assert "if this is a data set, write seed=1" in mark.sentence


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ('d = tf.data.Dataset.list_files("*.x")', "write seed=1"),
        ("d = d.apply(tf.data.experimental.shuffle_and_repeat(100))", "write seed=1"),
        ("d = d.interleave(f, deterministic=False)", "deterministic=False: all workers must read the same rows"),
        ("d = tfds.load('mnist', shuffle_files=True)", "shuffle_files=True: all workers must read the same rows"),
        ("d = d.map(lambda x: x + tf.random.uniform(()))", "write tf.random.set_seed(1)"),
        ("d = d.map(lambda x: tf.image.random_flip_left_right(x))", "tf.image: all workers must read the same rows"),
        ("d = d.map(lambda x: tf.image.random_crop(x, (2, 2)))", "write tf.random.set_seed(1)"),
        ("os.environ.update(TF_CONFIG=json.dumps({'task': {'type': 'worker', 'index': 0}}))", "os.environ.setdefault('TF_CONFIG'"),
    ],
)  # fmt: skip
def test_what_workers_would_do_each_in_their_own_way_is_marked(line, advice):
    (mark,) = translate(f"{TF}{SEVERAL}{line}\n").todos
    assert advice in mark.sentence
    assert not translate(f"{TF}strategy = tf.distribute.MirroredStrategy()\n{line}\n").todos


@pytest.mark.parametrize(
    "line",
    [
        'd = tf.data.Dataset.list_files("*.x", shuffle=False)',
        'd = tf.data.Dataset.list_files("*.x", seed=4)',
        "d = tfds.load('mnist', shuffle_files=False)",
        "d = d.map(lambda x: x + tf.random.stateless_uniform((), (1, 2)))",
        "tf.random.set_seed(4)\nd = d.map(lambda x: x + tf.random.uniform(()))",
        "tf.random.set_seed(4)\nd = d.map(lambda x: tf.image.random_flip_left_right(x))",
        "d = d.map(lambda x: tf.image.random_flip_left_right(x, seed=4))",
        "d = d.map(lambda x: tf.image.stateless_random_crop(x, (2, 2), (1, 2)))",
        "d = d.map(lambda x: tf.image.resize(x, (2, 2)))",
        "os.environ.update(OMP_NUM_THREADS='1')",
    ],
)
def test_what_all_workers_do_alike_is_not_marked(line):
    assert not translate(f"{TF}{SEVERAL}{line}\n").todos


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("train.summary_iterator", "files of events"),
        ("losses.get_regularization_loss", "model.losses"),
        ("losses.mean_squared_error", "the loss of keras.losses"),
        ("count_up_to", "count in Python"),
        ("py_func", "jax.pure_callback"),
        ("nn.dynamic_rnn", "keras.layers.RNN"),
        ("data.make_one_shot_iterator", "for batch in dataset"),
        ("make_template", "a keras.layers.Layer"),
    ],
)
def test_each_name_of_tensorflow_1_has_advice_of_its_own(name, advice):
    for prefix in ("tf.compat.v1.", "tf."):
        (mark,) = translate(f"{TF}x = {prefix}{name}(y)\n").todos
        assert advice in mark.sentence


def test_a_file_that_goes_with_a_program_for_workers_is_translated_as_one(tmp_path):
    (tmp_path / "rows.py").write_text(f"{TF}\ndef rows():\n    return tf.data.Dataset.range(9).shuffle(9)\n")
    (tmp_path / "main.py").write_text(f"import rows\n{TF}{SEVERAL}")
    files = [str(tmp_path / name) for name in ("rows.py", "main.py")]
    assert "shuffle(9, seed=1)" in migrate(files)[0].after
    assert "shuffle(9)" in migrate(files[:1])[0].after


def test_what_advice_names_is_there():
    for name, advice in ABSENT.items():
        for found in re.findall(r"\b(?:keras|lockstep)(?:\.\w+)+", advice):
            assert exists(found.removesuffix(".keras")), (name, found)


# --- lockstep migrate --check ----------------------------------------------------------------------------------------

STARTS = """
import json, os
import numpy as np
import tensorflow as tf
from rows import COLUMNS

config = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}
columns = int(open(os.path.join(os.path.dirname(__file__), "columns.txt")).read())
os.environ["TF_CONFIG"] = json.dumps(config)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(np.max([1, 2]))])
    model.compile("sgd", "mse")
print("printed by the script")
model.fit(np.ones((8, min(COLUMNS, columns))), np.ones((8, 2)), batch_size=4)
print("not reached")
"""


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (lambda code: code, 0, "main.py reaches its first fit"),
        (
            lambda code: code.replace('["TF_CONFIG"] = json.dumps(config)', ".pop('TF_CONFIG', None)"),
            0,
            "main.py reaches its first fit",
        ),
        (lambda code: code.replace("COLUMNS,", "MISSING,"), 2, "main.py failed before its first fit"),
        (lambda code: code.partition("model.fit")[0], 2, "the script ended without a call of fit"),
        (lambda code: code.replace("MultiWorkerMirrored", "ParameterServer"), 0, "--check does not run main.py"),
    ],
)
def test_check_says_whether_the_new_program_starts(change, code, says, python, tmp_path):
    (tmp_path / "main.py").write_text(change(STARTS))
    (tmp_path / "rows.py").write_text(f"{TF}COLUMNS = int(open(__file__.replace('rows.py', 'columns.txt')).read())\n")
    (tmp_path / "columns.txt").write_text("3\n")
    before = (tmp_path / "main.py").read_text()
    command = "from lockstep.cli import main; raise SystemExit(main(['migrate', '--check', 'rows.py', 'main.py']))"
    done = python(code=command, cwd=tmp_path, environ={"KERAS_BACKEND": None}, timeout=120)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert "not reached" not in done.stderr + done.stdout
    assert done.stdout.startswith("--- rows.py\n")
    assert "printed by the script\n" not in done.stdout.splitlines()
    assert (tmp_path / "main.py").read_text() == before
