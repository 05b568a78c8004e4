"""Access to what Keras does not document. No other package reads Keras's internals.

``patches`` lists every attribute that is replaced, with the files that do it; the other files have the functions that other packages
call, by topic. All of it was written against Keras 3.15.
"""

from lockstep._errors import BackendError

try:
    import keras as keras
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "tensorflow":
        raise
    raise BackendError(
        "Keras starts with the TensorFlow backend unless it is configured otherwise. Lockstep needs JAX. Fix: set "
        'os.environ["KERAS_BACKEND"] = "jax" (or export KERAS_BACKEND=jax) before the first import of keras or lockstep.'
    ) from None  # The traceback into Keras does not help.
