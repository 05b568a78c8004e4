"""The same job under Kubernetes: an Indexed Job with a pod for each node, and the headless Service that gives pods names."""

import json

from lockstep.distributed.cluster.exit_codes import USER_ERROR
from lockstep.launch.failure_report import USAGE
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.templates.common import job_name, port_of, program_of, run_options

__all__ = ["manifest"]

_SECONDS_MORE = 10  # Than the workers have, for the supervisor.
_MANIFEST = """\
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: {name}
  ports:
    - name: coordinator
      port: {port}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: {failures}
{success}  podFailurePolicy:
    rules:
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
      - action: FailJob
        onExitCodes:
          containerName: worker
          operator: In
          values: [{codes}]
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: {seconds}
      containers:
        - name: worker
          image: YOUR_REGISTRY/YOUR_IMAGE
          command:{command}
          # resources: {{limits: {{nvidia.com/gpu: {workers}}}}}
          volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm
      volumes:
        - name: shared-memory
          emptyDir:
            medium: Memory
"""


# From Kubernetes 1.31 on: a node that was left out at the end must not keep the job from being done.
_SUCCESS = """\
  successPolicy:
    rules:
      - succeededIndexes: "0"
"""


def manifest(job: LaunchConfig) -> str:
    """The manifest for ``kubectl apply``; a pod whose program has an error ends the job, any other one is replaced.

    Where nodes meet, the job is done when node 0 is, as it ends with the code of the job.
    """
    name, port = job_name(job), port_of(job)
    hosts = ",".join(f"{name}-{node}.{name}:{port}" for node in range(job.nodes))
    where = ["--hosts", hosts, "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    command = ["lockstep", "run", *where, *map(_escaped, [*run_options(job), *program_of(job)])]
    lines = "".join(f"\n            - {json.dumps(word, ensure_ascii=False)}" for word in command)
    return _MANIFEST.format(
        name=name,
        port=port,
        nodes=job.nodes,
        workers=job.workers,
        command=lines,
        codes=f"{USAGE}, {USER_ERROR}",
        failures=job.nodes * (job.max_restarts + 1),
        success=_SUCCESS if job.is_elastic else "",
        seconds=int(job.grace) + _SECONDS_MORE,
    )


def _escaped(word: str) -> str:
    """Kubernetes takes ``$(NAME)`` for a variable and ``$$`` for a dollar."""
    return word.replace("$", "$$")
