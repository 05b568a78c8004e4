"""States of random generators in checkpoints."""

import base64
import json
import random

import numpy as np
import pytest

from lockstep.data.random_state import capture_random_state, check_random_state, restore_random_state
from lockstep.data.resumable_iterator import InputState


def as_earlier_versions_wrote(state):
    numbers = [*np.frombuffer(base64.b64decode(state["random"][1]), "uint32").tolist(), state["random"][3]]
    return state | {"random": [state["random"][0], numbers, state["random"][2]]}


def test_hooks_of_many_epochs_are_kept_without_repetitions():
    hooks = []
    for epoch in range(100):
        hooks += [["begin", capture_random_state()], ["end", capture_random_state()]]
        np.random.random(epoch % 3)
        random.random()
    kept = json.loads(json.dumps(InputState(hooks=tuple(hooks)).to_json()))
    assert InputState.from_json(kept).hooks == tuple(hooks)
    assert len(json.dumps(kept)) < 50_000


def test_a_random_state_of_an_earlier_version_is_restored():
    random.seed(7)
    state = as_earlier_versions_wrote(capture_random_state())
    check_random_state(state)
    expected = [random.random() for _ in range(3)]
    restore_random_state(json.loads(json.dumps(state)))
    assert [random.random() for _ in range(3)] == expected
    with pytest.raises(ValueError, match="no state of random generators"):
        check_random_state(state | {"random": [*state["random"][:2], 7]})
