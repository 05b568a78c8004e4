"""Cluster resolver for ``TF_CONFIG``, as in TensorFlow's tutorials; ``lockstep run`` sets it, too."""

import json
import os
from collections.abc import Mapping
from typing import Any

from lockstep._errors import ClusterError, is_decimal, shortened
from lockstep.distributed.cluster.env_reader import EnvReader
from lockstep.distributed.cluster.membership import ClusterSpec, Membership, find_membership
from lockstep.distributed.resolvers.base import EnvironmentResolver, check_texts


class TFConfigClusterResolver(EnvironmentResolver):
    """The cluster in ``TF_CONFIG``: ``{"cluster": {job: [address, …], …}, "task": {"type": job, "index": number}}``.

    It may have ``"environment"``, ``"rpc_layer"`` and ``"session_master"``, too. It is read when the resolver is made, so a program may set
    it first. Counterpart of ``tf.distribute.cluster_resolver.TFConfigClusterResolver``.

    Args:
        task_type: instead of the type in ``TF_CONFIG``.
        task_id: instead of the index in ``TF_CONFIG``.
        rpc_layer: instead of that in ``TF_CONFIG``.
        environment: instead of that in ``TF_CONFIG``.
        environ: has ``TF_CONFIG``.

    Raises:
        ClusterError: it is no JSON, lacks something, or contradicts itself.
        OptionError: an argument has another type.

    Example:
        >>> from lockstep.cluster_resolver import TFConfigClusterResolver
        >>> config = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
        >>> TFConfigClusterResolver(environ={"TF_CONFIG": config})
        <TFConfigClusterResolver: worker 1 of 2 (b:2222), worker 0 at a:2222, from TF_CONFIG>
    """

    source = "TF_CONFIG"
    variables = ("TF_CONFIG",)
    fix = "set it to JSON such as " + json.dumps(
        {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}
    )

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        check_texts(task_type=task_type, rpc_layer=rpc_layer, environment=environment)
        self._given = task_type, task_id
        super().__init__(environ)
        config = _parse(environ["TF_CONFIG"])
        self._master, layer, place = (_text(config, name) for name in ("session_master", "rpc_layer", "environment"))
        self._rpc_layer = layer if rpc_layer is None else rpc_layer
        self._environment = place or "" if environment is None else environment

    @classmethod
    def is_present(cls, environ: Mapping[str, str]) -> bool:
        """True unless ``TF_CONFIG`` is missing, blank, or says that there is no cluster."""
        text = environ.get("TF_CONFIG", "")
        try:
            config = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            return True
        return not (isinstance(config, dict) and (not config or config.get("cluster") == {}))

    def _read(self, variables: EnvReader) -> Membership:
        config = _parse(variables.text("TF_CONFIG", "the cluster and this process's task"))
        if "cluster" not in config:
            raise ClusterError(f"TF_CONFIG: 'cluster' is missing; it has {list(config)}. Fix: {self.fix}")
        try:
            spec = ClusterSpec(config["cluster"])
        except ClusterError as error:
            raise ClusterError(f"TF_CONFIG: {error}") from None
        task = _check_object(config.get("task", {}), "TF_CONFIG: task")
        job, index = self._given
        job = _task_type(task) if job is None and "type" in task else job
        index = _task_index(task["index"]) if index is None and "index" in task else index
        return find_membership("TF_CONFIG", spec, job, index, variables.environ)


def _parse(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        around = text[max(0, error.pos - 20) : error.pos + 20]
        raise ClusterError(
            f"TF_CONFIG is no JSON: {error.msg} at character {error.pos}, near {around!r}. Fix: write double quotes and no "
            "comma after the last item, as json.dumps does for a dict."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"TF_CONFIG cannot be read as JSON: {error}. Fix: write it with json.dumps.") from None
    return _check_object(config, "TF_CONFIG")


def _check_object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ClusterError(
            f"{name}: expected a JSON object {{…}}, got {json.dumps(value)}. Fix: write it with json.dumps of a dict."
        )
    return value


def _text(config: dict[str, Any], name: str) -> str | None:
    value = config.get(name)
    if not isinstance(value, str | None):
        raise ClusterError(
            f"TF_CONFIG: {name}: expected a text, got {json.dumps(value)}. Fix: write it in double quotes, or leave it out."
        )
    return value


def _task_type(task: dict[str, Any]) -> str:
    if not isinstance(task["type"], str):
        raise ClusterError(
            f'TF_CONFIG: task type: expected a text such as "worker", got {json.dumps(task["type"])}. Fix: name a job of the cluster.'
        )
    return task["type"]


def _task_index(index: Any) -> int:
    """Return a task index, which may be a text, as in TensorFlow."""
    if isinstance(index, bool) or not (isinstance(index, int) or (isinstance(index, str) and is_decimal(index))):
        raise ClusterError(
            f"TF_CONFIG: task index: expected a whole number from 0, got {shortened(json.dumps(index))}. Fix: number the tasks of each job from 0."
        )
    return int(index)
