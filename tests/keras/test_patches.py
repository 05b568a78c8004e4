"""The table of patches is complete, and every patch that ends leaves Keras as it was."""

import ast
import contextlib
import re
import types
from pathlib import Path

import keras
import pytest

import lockstep
from lockstep._keras import batch_normalization, graph, patches, placeholders, trainer

PACKAGE = Path(lockstep.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "versions.md"
# Attributes of other objects than Keras's, or values that are kept on a model and replace nothing.
OTHER_WRITERS = {
    "strategies/base.py",
    "fit/checkpointing/callback_attributes.py",
    "launch/worker_main.py",  # names of the module __main__
    "_keras/graph.py",
    "_keras/layer_attributes.py",
    "_keras/recompute.py",
    "_keras/patches.py",
    "_keras/trainer.py",
}


CHECKPOINT = keras.callbacks.ModelCheckpoint("folder/best.keras")


class Failure(Exception):
    """Raised while a patch is in place."""


@pytest.fixture
def model():
    inputs = keras.Input((3,))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(4)(inputs))
    made = keras.Model(inputs, keras.layers.Dense(2)(x))
    made.compile("adam", "mse")
    return made


def owners(patch, model):
    """Objects with the attributes of an entry: the classes that define them, or instances."""
    if patch.target == "class Model":
        return [next(cls for cls in keras.Model.__mro__ if name in vars(cls)) for name in patch.attributes]
    kinds = {
        "class BatchNormalization": keras.layers.BatchNormalization,
        "class Optimizer": next(cls for cls in keras.Optimizer.__mro__ if "add_variable_from_reference" in vars(cls)),
        "callback of class ModelCheckpoint": CHECKPOINT,
        "class Variable": next(cls for cls in keras.Variable.__mro__ if "_initialize" in vars(cls)),
        "model": model,
        "model of KerasHub": types.SimpleNamespace(**dict.fromkeys(patch.attributes)),
        "layer": model.layers[2],
        "layer of class BatchNormalization": model.layers[2],
        "module of the backend's devices": trainer.backend_devices,
        "module keras.saving, and keras.models": keras.saving,
        "optimizer": model.optimizer,
    }
    return [kinds[patch.target]] * len(patch.attributes)


def snapshot(model):
    """All attributes of Keras's classes, and of a model, its layers and its optimizer."""
    kinds = keras.Model, keras.layers.BatchNormalization, keras.Variable, type(model.optimizer)
    classes = {cls for kind in kinds for cls in kind.__mro__} - {object}
    objects = [
        *classes,
        model,
        *model.layers,
        model.optimizer,
        trainer.backend_devices,
        CHECKPOINT,
        keras.models,
        keras.saving,
    ]
    return {id(one): dict(vars(one)) for one in objects}


def all_patches(model):
    """Each entry as a context that replaces all of its attributes by functions that are never called."""
    for patch in patches.PATCHES:
        replacements = [
            (owner, name, lambda *args, **kwargs: pytest.fail("called"))
            for owner, name in zip(owners(patch, model), patch.attributes, strict=True)
        ]
        yield patches.patched(patch, replacements)


def in_use(model):
    """The contexts that the package opens, each with arguments that do nothing."""
    yield trainer.claim_models(lambda: None)
    yield trainer.claim_models(lambda: None)
    yield placeholders.placeholder_variables()
    yield trainer.intercept_fit(lambda model, fit, args, kwargs: None)
    yield trainer.observe_calls(patches.OBSERVE_COMPILE, lambda model: None)
    yield trainer.observe_saves(lambda model: None)
    yield trainer.redirect_super(model, "fit", lambda: None)
    yield trainer.redirect_super(model, "predict", lambda: None)
    yield trainer.refresh_before_sync(model, lambda: None)
    yield patches.patched_method(patches.STATELESS_CALL, [model], lambda *args: None)
    yield patches.patched_method(patches.STATELESS_CALL, [model], lambda *args: None)
    yield batch_normalization.disable_batch_statistics(model, lambda value: value)
    yield batch_normalization.clear_synchronized(model)
    yield patches.patched_method(patches.LAYER_CALL, graph.operations_of(model), lambda layer, call: call)
    yield patches.patched_method(patches.LOSS, [model], lambda model, compute_loss: compute_loss)
    yield patches.patched_method(patches.OPTIMIZER_UPDATE, [model.optimizer], lambda optimizer, apply: apply)


def unchanged(before, after):
    return all(
        set(before[one]) == set(after[one]) and all(before[one][name] is after[one][name] for name in before[one])
        for one in before
    )


@pytest.mark.parametrize("contexts", [all_patches, in_use])
@pytest.mark.parametrize("fails", [False, True])
def test_keras_is_unchanged_after_all_patches(model, contexts, fails):
    before = snapshot(model)
    with contextlib.suppress(Failure), contextlib.ExitStack() as stack:
        for context in contexts(model):
            stack.enter_context(context)
        assert not unchanged(before, snapshot(model))
        if fails:
            raise Failure
    assert unchanged(before, snapshot(model))


def test_a_failure_while_classes_are_patched_leaves_none_patched_and_the_next_context_patches_them(model, monkeypatch):
    before = snapshot(model)

    def fail(*args):
        raise Failure

    with monkeypatch.context() as context:
        context.setattr(trainer, "_laying_out", fail)
        with pytest.raises(Failure), trainer.claim_models(lambda: None):
            pass
    assert unchanged(before, snapshot(model))
    with trainer.claim_models(lambda: None):
        assert not unchanged(before, snapshot(model))
    assert unchanged(before, snapshot(model))


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: f"{patch.target}: {patch.attributes[0]}")
def test_each_entry_replaces_attributes_that_keras_has_and_restores_them(model, patch):
    before = snapshot(model)
    for owner, name in zip(owners(patch, model), patch.attributes, strict=True):
        original, new = getattr(owner, name), object()
        with patches.patched(patch, [(owner, name, new)]):
            assert getattr(owner, name) is new
        assert getattr(owner, name) == original
    assert unchanged(before, snapshot(model))
    assert all((patch.lifetime, patch.reason, patch.public_api))


@pytest.mark.parametrize("name", [name for name, one in vars(patches).items() if isinstance(one, patches.Patch)])
def test_each_entry_names_the_files_that_use_it(name):
    files = sorted(PACKAGE.rglob("*.py"))
    using = [str(path.relative_to(PACKAGE)) for path in files if re.search(rf"\b{name}\b", path.read_text())]
    assert sorted({*using} - {"_keras/patches.py"}) == sorted(getattr(patches, name).used_by)


def test_attributes_outside_of_the_table_are_refused_and_earlier_ones_restored(model):
    before = snapshot(model)
    with pytest.raises(LookupError, match="'predict'"):
        patches.install(patches.LOSS, [(model, "compute_loss", None), (model, "predict", None)])
    assert unchanged(before, snapshot(model))


def test_patches_of_one_attribute_nest(model):
    first, second = object(), object()
    with patches.patched_method(patches.STATELESS_CALL, [model], lambda *args: first):
        with patches.patched_method(patches.STATELESS_CALL, [model], lambda *args: second):
            assert model.stateless_call is second
        assert model.stateless_call is first
    assert "stateless_call" not in vars(model)


def writes_attributes(tree):
    """Whether a file replaces attributes of objects by ``setattr``, ``vars`` or ``__dict__``."""

    def is_namespace(node):
        is_vars = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars"
        return is_vars or (isinstance(node, ast.Attribute) and node.attr == "__dict__")

    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="setattr" | "delattr")):
                return True
            case ast.Subscript(value=target, ctx=ast.Store() | ast.Del()) if is_namespace(target):
                return True
            case ast.Call(func=ast.Attribute(value=target, attr="update" | "pop" | "setdefault")) if is_namespace(
                target
            ):
                return True
    return False


def test_no_other_file_replaces_attributes():
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if writes_attributes(ast.parse(path.read_text()))
    }
    assert found <= OTHER_WRITERS


def test_the_documentation_says_which_api_would_replace_each_patch():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    expected = [
        f"| {patch.target} | {', '.join(f'`{name}`' for name in patch.attributes)} | {patch.reason} | {patch.public_api} |"
        for patch in patches.PATCHES
    ]
    assert rows[2:] == expected
