"""The page about errors says what the library says."""

import importlib.util
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import lockstep
from lockstep.distributed.cluster import exit_codes
from lockstep.distributed.control.failure_detector import make_failure
from lockstep.distributed.control.failures import FailureKind
from lockstep.distributed.control.peer import Peer

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def maker():
    specification = importlib.util.spec_from_file_location(
        "make_troubleshooting", ROOT / "docs" / "make_troubleshooting.py"
    )
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # Where dataclasses look for it.
    specification.loader.exec_module(module)
    yield module
    del sys.modules[specification.name]


@pytest.fixture(scope="module")
def messages(maker):
    return maker.messages()


def test_the_page_is_what_the_sources_say(maker):
    assert maker.PAGE.read_text() == maker.page(maker.PAGE.read_text()), "run python docs/make_troubleshooting.py"


def test_every_error_has_its_entries(maker, messages):
    assert {message.error for message in messages} == set(maker.errors())
    assert set(maker.errors()) == {name for name in lockstep.__all__ if name.endswith("Error")} - {"LockstepError"}


def test_every_topic_is_one_that_has_messages(maker, messages):
    assert set(maker._TOPICS) == {message.topic for message in messages}


def pattern(text):
    """What a message of the page looks like when it is printed."""
    parts = re.split(r"(?<!\\)\*[^*]+(?<!\\)\*|…", text)
    return ".*".join(re.escape(re.sub(r"\\(.)|`", r"\1", part)) for part in parts)


def raised(call):
    with pytest.raises(lockstep.LockstepError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: lockstep.MirroredStrategy(replicas=0),  # a helper's parameters
        lambda: lockstep.MirroredStrategy(["gpu"]),  # one text
        lambda: lockstep.MirroredStrategy(cross_device_ops="rings"),  # values
        lambda: lockstep.InputContext(1, 0, 4).get_per_replica_batch_size(5),
        lambda: lockstep.cluster_resolver.TFConfigClusterResolver({"TF_CONFIG": "{"}).cluster_spec(),
        lambda: lockstep.cluster_resolver.TorchrunClusterResolver(
            {}
        ).cluster_spec(),  # a helper that is given a sentence
        lambda: lockstep.cluster_resolver.ClusterSpec({"worker": []}),
        lambda: lockstep.compute_average_loss(jnp.zeros(())),
        lambda: lockstep.callbacks.NanGuard("pray"),
    ],
)
def test_what_is_printed_stands_in_the_page(messages, call):
    name, printed = raised(call)
    texts = [message.text for message in messages if message.error == name]
    assert [text for text in texts if re.fullmatch(pattern(text), printed, flags=re.DOTALL)], printed


def test_what_a_lost_worker_makes_the_others_say_stands_in_the_page(messages):
    peer = Peer(1, 2, "node1", 77)
    said = make_failure(
        FailureKind.STUCK, peer, "is stuck: in step 7 for 60 s; worker 0 waits for it in step 8."
    ).sentence
    assert any(re.fullmatch(pattern(message.text), said) for message in messages if "is stuck" in message.text)


def test_every_exit_code_stands_in_the_page(maker):
    page = maker.PAGE.read_text()
    assert all(
        f"| {getattr(exit_codes, name)} | {name.lower().replace('_', ' ')} |" in page for name in exit_codes.__all__
    )
