"""Job scripts for schedulers that do what ``lockstep run`` would do, one function each, and the table of all printers.

The manifests for Kubernetes, an Indexed Job, a JobSet, and a TrainJob of Kubeflow Trainer with its runtime, run one ``lockstep run`` in each
pod. What follows the end of a pod is the same:

- It was drained, or ended with 75 (another worker was lost, or the job was preempted): the Job replaces it and does not count this.
- It ended with 2 or 13 (an error of the program): the job fails.
- Anything else counts as a restart.

Printed scripts stay in use for years: the commands, options and environment variables in them must keep working.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from textwrap import indent

from lockstep._errors import PEER_LOST, USER_ERROR, OptionError
from lockstep.distributed.cluster.addresses import split_address
from lockstep.launch.launch_config import LaunchConfig, first_port, job_name, program_words, run_options
from lockstep.launch.worker_process import USAGE

_SLURM_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=USR1@120
#SBATCH --requeue{more}
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
# Settings that depend on your cluster:
##SBATCH --partition=PARTITION
##SBATCH --time=04:00:00
##SBATCH --gpus-per-node={workers}

set -uo pipefail
# source YOUR_ENVIRONMENT/bin/activate

# The processes of the job prove to each other that they know this secret. All nodes must see the file.
if [ -z "${{LOCKSTEP_SECRET:-}}${{LOCKSTEP_SECRET_FILE:-}}" ]; then
    export LOCKSTEP_SECRET_FILE=$HOME/.lockstep-secret-$SLURM_JOB_ID
    trap 'rm -f "$LOCKSTEP_SECRET_FILE"' EXIT
    rm -f "$LOCKSTEP_SECRET_FILE"
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$LOCKSTEP_SECRET_FILE") || exit
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
hosts=$(printf ',%s:{port}' "${{nodes[@]}}")
export hosts=${{hosts:1}}
{container}
{start} \\
    {options} \\
    {program}
code=$?{result}

if [ "$code" -eq {again} ]; then  # Preempted, or a worker was lost: try again.
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_SLURM_START = """\
# One supervisor on each node; it starts the workers there.
srun {flags}--kill-on-bad-exit=1 bash -c 'exec lockstep run --hosts "$hosts" --node-rank "$SLURM_NODEID" "$@"' lockstep"""

# srun exits with the largest code of all nodes; that of the job is node 0's, on whose machine this script runs. A signal to all
# processes of a step must not end the shell before the supervisor.
_SLURM_ELASTIC_START = """\
result=$(mktemp{folder}) && export result
# One supervisor on each node; it starts the workers there, and the remaining ones continue when a node fails.
srun {flags}--no-kill --kill-on-bad-exit=0 bash -c 'trap : TERM INT HUP USR1
    lockstep run --hosts "$hosts" --node-rank "$SLURM_NODEID" "$@"
    code=$?; [ "$SLURM_NODEID" != 0 ] || echo "$code" > "$result"; exit "$code"' lockstep"""
# Flags of https://github.com/NVIDIA/pyxis. The container sees this directory and the file of the secret at their own paths.
_SLURM_CONTAINER = """
container=(--container-image={image} --container-workdir="$PWD" --container-mounts="$PWD:$PWD"{mounts})
if [ -n "${{LOCKSTEP_SECRET_FILE:-}}" ]; then
    container[-1]+=",$LOCKSTEP_SECRET_FILE:$LOCKSTEP_SECRET_FILE:ro"
fi
"""
_SLURM_ELASTIC_RESULT = '\n[ ! -s "$result" ] || code=$(cat "$result")\nrm -f "$result"'


def slurm_script(job: LaunchConfig) -> str:
    """Return a script for ``sbatch`` that starts one ``lockstep run`` on each node.

    Slurm sends USR1 to the workers two minutes before it ends the job; a job that then exits with 75 is queued again.
    """
    options = shlex.join(run_options(job))
    if job.is_elastic:  # The maximum is the number of nodes that Slurm allocates.
        options = options.replace(f"--nnodes {job.nnodes}", f'--nnodes "{job.min_nodes}:${{#nodes[@]}}"', 1)
    return _SLURM_SCRIPT.format(
        name=job_name(job),
        nodes=f"{job.min_nodes}-{job.nodes}" if job.is_elastic else job.nodes,
        container=_slurm_container(job),
        start=_slurm_start(job),
        more="\n#SBATCH --no-kill" if job.is_elastic else "",
        result=_SLURM_ELASTIC_RESULT if job.is_elastic else "",
        workers=job.workers,
        port=first_port(job),
        options=options,
        program=shlex.join(program_words(job)),
        again=PEER_LOST,
    )


def _slurm_container(job: LaunchConfig) -> str:
    """Return the lines that set Pyxis's flags; none if there is no image."""
    if job.container_image is None:
        return ""
    mounts = "" if job.container_mounts is None else shlex.quote(f",{job.container_mounts}")
    return _SLURM_CONTAINER.format(image=shlex.quote(job.container_image), mounts=mounts)


def _slurm_start(job: LaunchConfig) -> str:
    """Return the command that starts a supervisor on each node."""
    is_contained = job.container_image is not None
    text = _SLURM_ELASTIC_START if job.is_elastic else _SLURM_START
    flags, folder = ('"${container[@]}" ', ' -p "$PWD"') if is_contained else ("", "")
    return text.replace("{flags}", flags).replace("{folder}", folder)


# https://docs.skypilot.co/en/latest/reference/yaml-spec.html
_SKYPILOT_TASK = """\
# sky jobs launch --secret LOCKSTEP_SECRET="$(openssl rand -hex 32)" {name}.yaml
name: "{name}"
num_nodes: {nodes}
workdir: .
resources:
  # accelerators: H100:{workers}
  # use_spot: true
{image}  job_recovery:
    max_restarts_on_errors: {restarts}
    recover_on_exit_codes: [{again}]  # A worker was lost, or the job was preempted: does not count as a restart.
secrets:
  LOCKSTEP_SECRET: null
# volumes:
#   /checkpoints: YOUR_VOLUME  # For BackupAndRestore: all nodes and all restarts must see it.
setup: |
  pip install keras-lockstep
run: |
  hosts=$(echo "$SKYPILOT_NODE_IPS" | sed 's/$/:{port}/' | paste -sd, -)
  exec lockstep run --hosts "$hosts" --node-rank "$SKYPILOT_NODE_RANK" \\
    {options} \\
    {program}
"""


def skypilot_task(job: LaunchConfig) -> str:
    """Return a task file for ``sky jobs launch``, which starts one ``lockstep run`` on each node.

    ``--max-restarts`` is the number of restarts of the whole job by SkyPilot; the supervisors on the nodes make none. Exit code 75 does not
    count.

    Raises:
        OptionError: the number of nodes is a range.
    """
    _refuse_range("skypilot", "SkyPilot allocates all nodes of a job or none", job)
    image = "" if job.container_image is None else f"  image_id: {json.dumps(f'docker:{job.container_image}')}\n"
    return _SKYPILOT_TASK.format(
        name=job_name(job),
        nodes=job.nodes,
        workers=job.workers,
        image=image,
        restarts=job.max_restarts,
        again=PEER_LOST,
        port=first_port(job),
        options=_in_block(shlex.join(run_options(replace(job, max_restarts=0)))),
        program=_in_block(shlex.join(program_words(job))),
    )


def _in_block(text: str) -> str:
    """Indent further lines of a text as those of a block scalar of YAML, which removes the two spaces."""
    return text.replace("\n", "\n  ")


_RAY_SCRIPT = '''\
"""Runs {name} on {nodes} x {workers} workers under Ray."""

import os
import secrets
import subprocess
import sys

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {nodes}
WORKERS = {workers}  # on each node
PORT = {port}  # of the first worker; the other workers take the ports above it
RESOURCES = {{"CPU": WORKERS}}  # of a node; {{"CPU": WORKERS, "GPU": WORKERS}} for one GPU a worker
RUN = {options!r}
PROGRAM = {program!r}


@ray.remote(num_cpus=RESOURCES["CPU"], num_gpus=RESOURCES.get("GPU", 0))
class Node:
    """One node of the job."""

    def address(self, rank):
        """Return the address of its first worker; the ports differ in case two nodes share a machine."""
        return f"{{ray.util.get_node_ip_address()}}:{{PORT + rank * WORKERS}}"

    def run(self, rank, hosts, secret):
        """Run its workers, and return their exit code; 1 if a signal has killed lockstep run."""
        node = ["--hosts", ",".join(hosts), "--node-rank", str(rank)]
        environment = {{**os.environ, "LOCKSTEP_SECRET": secret, "LOCKSTEP_SECRET_FILE": ""}}
        code = subprocess.call([sys.executable, "-m", "lockstep.cli", "run", *node, *RUN, *PROGRAM], env=environment)
        return code if code >= 0 else 1


def main():
    """Start all nodes at once, or none, and return the largest exit code."""
    ray.init()
    group = ray.util.placement_group([RESOURCES] * NODES, strategy="SPREAD")
    ray.get(group.ready())
    nodes = [
        Node.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank)).remote() for rank in range(NODES)
    ]
    hosts = ray.get([node.address.remote(rank) for rank, node in enumerate(nodes)])
    secret = secrets.token_hex(32)  # The processes of the job prove to each other that they know it.
    return max(ray.get([node.run.remote(rank, hosts, secret) for rank, node in enumerate(nodes)]))


if __name__ == "__main__":
    sys.exit(main())
'''


def ray_script(job: LaunchConfig) -> str:
    """Return a Python script that starts ``lockstep run`` on each node, for ``python`` or ``ray job submit``; it does not need Ray Train.

    Raises:
        OptionError: the number of nodes is a range.
    """
    _refuse_range("ray", "Ray allocates all nodes of a placement group or none", job)
    return _RAY_SCRIPT.format(
        name=job_name(job),
        nodes=job.nodes,
        workers=job.workers,
        port=first_port(job),
        options=run_options(job),
        program=program_words(job),
    )


_TORCHRUN_SECRET = (
    'export LOCKSTEP_SECRET_FILE="${LOCKSTEP_SECRET_FILE:?a file with the secret of the job, the same on all nodes}"\n'
)


def torchrun_commands(job: LaunchConfig) -> str:
    """Return a shell script with one torchrun command a node; the nodes of an elastic job share one command.

    Raises:
        OptionError: an option has no counterpart.

    Example:
        >>> print(torchrun_commands(LaunchConfig(("train.py",), workers=2)), end="")
        # node 0
        torchrun --nnodes=1 --nproc-per-node=2 --node-rank=0 --master-addr=127.0.0.1 --master-port=12421 train.py
    """
    for name in ("timeout", "grace", "allocator"):
        if getattr(job, name) != getattr(LaunchConfig, name):
            raise OptionError(
                f"--print torchrun: torchrun has no counterpart of --{name}. Fix: omit it, or print another script, which runs lockstep run."
            )
    if job.is_elastic:
        return f"# each node\n{_TORCHRUN_SECRET}{_torchrun_command(job, _torchrun_rendezvous(job))}\n"
    secret = _TORCHRUN_SECRET if job.nodes > 1 else ""
    commands = (_torchrun_command(job, _torchrun_node(job, node)) for node in range(job.nodes))
    return "".join(f"# node {node}\n{secret}{command}\n" for node, command in enumerate(commands))


def _torchrun_node(job: LaunchConfig, node: int) -> list[str]:
    return [f"--node-rank={node}", f"--master-addr={_torchrun_host(job)}", f"--master-port={first_port(job)}"]


def _torchrun_rendezvous(job: LaunchConfig) -> list[str]:
    limits = f"--rdzv-conf=join_timeout={job.start_seconds:.0f},last_call_timeout={job.join_seconds:.0f}"
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-id={job_name(job)}",
        f"--rdzv-endpoint={_torchrun_host(job)}:{first_port(job)}",
        limits,
    ]


def _torchrun_command(job: LaunchConfig, node: list[str]) -> str:
    options = [f"--nnodes={job.nnodes}", f"--nproc-per-node={job.workers}", *node]
    options += [f"--max-restarts={job.max_restarts}"] if job.max_restarts else []
    if job.log_dir is not None:  # 3: the output and the errors of all workers
        options += [f"--log-dir={shlex.quote(str(job.log_dir))}", "--tee=3" if job.tee else "--redirects=3"]
    return " ".join(["torchrun", *options, *(["-m"] if job.is_module else []), shlex.join(job.program)])


def _torchrun_host(job: LaunchConfig) -> str:
    if job.coordinator_address is not None:
        return shlex.quote(split_address("coordinator", job.coordinator_address)[0])
    return '"${FIRST_NODE:?the host of node 0}"' if job.nodes > 1 else "127.0.0.1"


_SUPERVISOR_SECONDS = 10  # For the supervisor to exit after its workers.
_SECRET = """\
# First make the secret that the processes of the job prove to each other:
# kubectl create secret generic {name} --from-literal=secret="$(openssl rand -hex 32)"
"""
_SERVICE = """\
apiVersion: v1
kind: Service
metadata:
  name: "{name}"
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: "{name}"
  ports:
    - name: coordinator
      port: {port}
---
"""
_JOB = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: "{name}"
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
  name: "{name}"
spec:
{spec}"""
_NODE = "node"  # The pods are NAME-node-0-0, NAME-node-0-1, …; the JobSet makes the Service NAME. A TrainJob needs this name.

# The policies are those of a runtime: a TrainJob cannot set them.
_TRAINJOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: "{name}"
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
  name: "{name}"
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: "{name}"
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
        name: "{name}"
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
        subdomain=f'subdomain: "{name}"\n    ',
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
    _refuse_range("jobset", "a JobSet starts all of its pods anew if one fails", job, ", or print kubernetes")
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
    _refuse_range(
        "trainjob", "the JobSet of a TrainJob starts all of its pods anew if one fails", job, ", or print kubernetes"
    )
    alone = replace(job, max_restarts=0)
    jobset = _jobset_spec(job, _job_spec(alone, container=_NODE), _TRAINER_METADATA)
    process = _process(alone, _pods_of_jobset(job), resources="resourcesPerNode")
    name = job_name(job)
    manifest = _TRAINJOB.format(
        name=name, nodes=job.nodes, jobset=indent(jobset, " " * 6), process=indent(process, " " * 4)
    )
    return _SECRET.format(name=name) + manifest


def _refuse_range(printer: str, reason: str, job: LaunchConfig, or_else: str = "") -> None:
    if job.is_elastic:
        raise OptionError(
            f"--print {printer}: {reason}, so it needs one number, got --nnodes {job.nnodes}. Fix: give one number{or_else}."
        )


def _pods_of_jobset(job: LaunchConfig) -> list[str]:
    return [f"{job_name(job)}-{_NODE}-0-{node}.{job_name(job)}" for node in range(job.nodes)]


def _jobset_spec(job: LaunchConfig, spec: str, metadata: str = "") -> str:
    """Return the ``spec`` of a JobSet with one replicated Job."""
    return _JOBSET_SPEC.format(
        restarts=job.max_restarts, job=_NODE, metadata=indent(metadata, " " * 6), spec=indent(spec, " " * 8)
    )


def _job_spec(job: LaunchConfig, **parts: str | int) -> str:
    """Return the ``spec`` of an Indexed Job; parts that are not given are empty."""
    empty = dict.fromkeys(("indexes", "success", "subdomain", "process"), "") | {"failures": 0}
    seconds = int(job.grace) + _SUPERVISOR_SECONDS
    return _JOB_SPEC.format(**empty | parts, again=PEER_LOST, final=f"{USAGE}, {USER_ERROR}", seconds=seconds)


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


JOB_SCRIPTS: Mapping[str, Callable[[LaunchConfig], str]] = {
    "slurm": slurm_script,
    "kubernetes": kubernetes_manifest,
    "jobset": jobset_manifest,
    "trainjob": trainjob_manifest,
    "skypilot": skypilot_task,
    "ray": ray_script,
    "torchrun": torchrun_commands,
}
