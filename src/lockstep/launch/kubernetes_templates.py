"""Manifests for Kubernetes, one function each: an Indexed Job, a JobSet, and a TrainJob of Kubeflow Trainer with its runtime.

All of them run one ``lockstep run`` in each pod. What follows the end of a pod is the same:

- It was drained, or ended with 75 (another worker was lost, or the job was preempted): the Job replaces it and does not count this.
- It ended with 2 or 13 (an error of the program): the job fails.
- Anything else counts as a restart.

Printed manifests stay in use for years: the commands, options and environment variables in them must keep working.
"""

import json
from dataclasses import replace
from textwrap import indent

from lockstep._errors import PEER_LOST, USER_ERROR, OptionError
from lockstep.launch.launch_config import LaunchConfig, first_port, job_name, program_words, run_options
from lockstep.launch.worker_process import USAGE

_SUPERVISOR_SECONDS = 10  # For the supervisor to exit after its workers.
_SECRET = """\
# First make the secret that the processes of the job prove to each other:
# kubectl create secret generic {name} --from-literal=secret="$(openssl rand -hex 32)"
"""
_SERVICE = """\
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
"""
_JOB = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
{spec}"""

# A rule's name has no dashes: https://github.com/kubernetes-sigs/jobset/blob/main/api/jobset/v1alpha2/jobset_types.go
_JOBSET_SPEC = """\
failurePolicy:
  maxRestarts: {restarts}
  rules:
    - name: errorOfTheProgram
      action: FailJobSet
      onJobFailureReasons:
        - PodFailurePolicy
replicatedJobs:
  - name: {job}
    replicas: 1
    template:
{metadata}      spec:
{spec}"""
_JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
{spec}"""
_NODE = "node"  # The pods are NAME-node-0-0, NAME-node-0-1, …; the JobSet makes the Service NAME. A TrainJob needs this name.

# The policies are those of a runtime: a TrainJob cannot set them.
_TRAINJOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: {name}
  labels:
    trainer.kubeflow.org/framework: jax
spec:
  mlPolicy:
    numNodes: {nodes}
    jax: {{}}
  template:
    spec:
{jobset}---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {name}
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: {name}
  trainer:
    numNodes: {nodes}
{process}"""
_TRAINER_METADATA = """\
metadata:
  labels:
    trainer.kubeflow.org/trainjob-ancestor-step: trainer
"""

_INDEXES = """\
completionMode: Indexed
completions: {nodes}
parallelism: {nodes}
"""
_JOB_SPEC = """\
{indexes}backoffLimit: {failures}
# activeDeadlineSeconds: 864000  # the only limit if pods always end with {again}
{success}podFailurePolicy:
  rules:
    - action: Ignore
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
    - action: Ignore
      onExitCodes:
        containerName: {container}
        operator: In
        values: [{again}]
    - action: FailJob
      onExitCodes:
        containerName: {container}
        operator: In
        values: [{final}]
template:
  spec:
    {subdomain}restartPolicy: Never
    terminationGracePeriodSeconds: {seconds}
    containers:
      - name: {container}
{process}        volumeMounts:
          - name: shared-memory
            mountPath: /dev/shm
    volumes:
      - name: shared-memory
        emptyDir:
          medium: Memory
"""
_PROCESS = """\
image: {image}
command:{command}
env:
  - name: LOCKSTEP_SECRET
    valueFrom:
      secretKeyRef:
        name: {name}
        key: secret
# {resources}: {{limits: {{nvidia.com/gpu: {workers}}}}}
"""


# From Kubernetes 1.31 on: a node that is not in the last generation must not prevent success.
_SUCCESS = """\
successPolicy:
  rules:
    - succeededIndexes: "0"
"""


def kubernetes_manifest(job: LaunchConfig) -> str:
    """Return a manifest for ``kubectl apply``: an Indexed Job with one pod a node, and the headless Service that names the pods.

    An elastic job is done when node 0 is, as node 0 ends with the code of the job.
    """
    name = job_name(job)
    process = _process(job, [f"{name}-{node}.{name}" for node in range(job.nodes)])
    spec = _job_spec(
        job,
        container="worker",
        indexes=_INDEXES.format(nodes=job.nodes),
        failures=job.nodes * (job.max_restarts + 1),
        success=_SUCCESS if job.is_elastic else "",
        subdomain=f"subdomain: {name}\n    ",
        process=indent(process, " " * 8),
    )
    service = _SERVICE.format(name=name, port=first_port(job))
    return _SECRET.format(name=name) + service + _JOB.format(name=name, spec=indent(spec, " " * 2))


def jobset_manifest(job: LaunchConfig) -> str:
    """Return a manifest for ``kubectl apply``: a JobSet with one pod a node, which starts all pods anew if one of them fails.

    ``--max-restarts`` is the number of such restarts; the supervisors in the pods make none.

    Raises:
        OptionError: the number of nodes is a range.
    """
    _refuse_range("jobset", "a JobSet", job)
    name = job_name(job)
    alone = replace(job, max_restarts=0)
    spec = _job_spec(
        alone,
        container="worker",
        indexes=_INDEXES.format(nodes=job.nodes),
        process=indent(_process(alone, _pods_of_jobset(job)), " " * 8),
    )
    jobset = _jobset_spec(job, spec)
    return _SECRET.format(name=name) + _JOBSET.format(name=name, spec=indent(jobset, " " * 2))


def trainjob_manifest(job: LaunchConfig) -> str:
    """Return a manifest for ``kubectl apply``: a TrainJob of Kubeflow Trainer 2, and a TrainingRuntime with its policies.

    The Trainer makes a JobSet of them, which behaves as that of :func:`jobset_manifest`.

    Raises:
        OptionError: the number of nodes is a range.
    """
    _refuse_range("trainjob", "the JobSet of a TrainJob", job)
    alone = replace(job, max_restarts=0)
    jobset = _jobset_spec(job, _job_spec(alone, container=_NODE), _TRAINER_METADATA)
    process = _process(alone, _pods_of_jobset(job), resources="resourcesPerNode")
    name = job_name(job)
    manifest = _TRAINJOB.format(
        name=name, nodes=job.nodes, jobset=indent(jobset, " " * 6), process=indent(process, " " * 4)
    )
    return _SECRET.format(name=name) + manifest


def _refuse_range(printer: str, which: str, job: LaunchConfig) -> None:
    if job.is_elastic:
        raise OptionError(
            f"--print {printer}: {which} starts all of its pods anew if one fails, so it needs one number, got --nnodes {job.nnodes}. "
            "Fix: give one number, or print kubernetes."
        )


def _pods_of_jobset(job: LaunchConfig) -> list[str]:
    return [f"{job_name(job)}-{_NODE}-0-{node}.{job_name(job)}" for node in range(job.nodes)]


def _jobset_spec(job: LaunchConfig, spec: str, metadata: str = "") -> str:
    """Return the ``spec`` of a JobSet with one replicated Job."""
    return _JOBSET_SPEC.format(
        restarts=job.max_restarts, job=_NODE, metadata=indent(metadata, " " * 6), spec=indent(spec, " " * 8)
    )


def _job_spec(
    job: LaunchConfig,
    container: str,
    indexes: str = "",
    failures: int = 0,
    success: str = "",
    subdomain: str = "",
    process: str = "",
) -> str:
    """Return the ``spec`` of an Indexed Job."""
    return _JOB_SPEC.format(
        container=container,
        indexes=indexes,
        failures=failures,
        success=success,
        subdomain=subdomain,
        process=process,
        again=PEER_LOST,
        final=f"{USAGE}, {USER_ERROR}",
        seconds=int(job.grace) + _SUPERVISOR_SECONDS,
    )


def _process(job: LaunchConfig, hosts: list[str], resources: str = "resources") -> str:
    """Return image, command and environment of a container that runs ``lockstep run`` on one of these hosts."""
    node = [
        "--hosts",
        ",".join(f"{host}:{first_port(job)}" for host in hosts),
        "--node-rank",
        "$(JOB_COMPLETION_INDEX)",
    ]
    command = ["lockstep", "run", *node, *map(_escaped, [*run_options(job), *program_words(job)])]
    return _PROCESS.format(
        name=job_name(job),
        image="YOUR_REGISTRY/YOUR_IMAGE" if job.container_image is None else json.dumps(job.container_image),
        command="".join(f"\n  - {json.dumps(word, ensure_ascii=False)}" for word in command),
        resources=resources,
        workers=job.workers,
    )


def _escaped(word: str) -> str:
    """Escape dollars: Kubernetes takes ``$(NAME)`` for a variable and ``$$`` for a dollar."""
    return word.replace("$", "$$")
