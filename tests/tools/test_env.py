"""The line that stands beside every figure."""

import keras

import lockstep
from lockstep.tools.env import describe_machine


def test_the_line_names_cores_and_versions():
    line = describe_machine()
    assert f"keras {keras.__version__}, keras-lockstep {lockstep.__version__}; 20" in line
    assert " cores; Python 3." in line
