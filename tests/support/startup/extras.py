"""Packages of extras that Keras imports if they are there, which takes half of its import. Users may not have them either."""

import contextlib
import sys

NAMES = ("sklearn", "matplotlib", "cv2")


def block():
    """Have imports of them fail."""
    sys.modules.update(dict.fromkeys(NAMES))


@contextlib.contextmanager
def blocked():
    """What is imported here does without them; whoever imports them later gets them, and whoever has them keeps them."""
    before = {name: sys.modules[name] for name in NAMES if name in sys.modules}
    block()
    yield
    for name in NAMES:
        del sys.modules[name]
    sys.modules.update(before)
