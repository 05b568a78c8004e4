"""Loaded by interpreters that tests start: packages of extras are not there.

Keras imports them if they are, which takes half of its import. Users without the extras do not have them either.
"""

import sys

for _name in ("sklearn", "matplotlib", "cv2"):
    sys.modules[_name] = None
