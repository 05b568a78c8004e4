"""Job scripts for Slurm, Kubernetes (as a Job or a JobSet), Ray and torchrun that do what ``lockstep run`` would do, one function each.

Printed scripts stay in use for years: the commands, options and environment variables in them must keep working.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from textwrap import indent

from lockstep._errors import OptionError
from lockstep.distributed.cluster.addresses import DEFAULT_PORT, split_address
from lockstep.distributed.cluster.exit_codes import PEER_LOST, USER_ERROR
from lockstep.launch.failure_report import USAGE
from lockstep.launch.launch_config import LaunchConfig

__all__ = ["PRINTERS"]

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
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$LOCKSTEP_SECRET_FILE") || exit
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
hosts=$(printf ',%s:{port}' "${{nodes[@]}}")
export hosts=${{hosts:1}}

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
srun --kill-on-bad-exit=1 bash -c 'exec lockstep run --hosts "$hosts" --node-rank "$SLURM_NODEID" "$@"' lockstep"""

# srun exits with the largest code of all nodes; that of the job is node 0's, on whose machine this script runs. A signal to all
# processes of a step must not end the shell before the supervisor.
_SLURM_ELASTIC_START = """\
result=$(mktemp) && export result
# One supervisor on each node; it starts the workers there, and the remaining ones continue when a node fails.
srun --no-kill --kill-on-bad-exit=0 bash -c 'trap : TERM INT HUP USR1
    lockstep run --hosts "$hosts" --node-rank "$SLURM_NODEID" "$@"
    code=$?; [ "$SLURM_NODEID" != 0 ] || echo "$code" > "$result"; exit "$code"' lockstep"""
_SLURM_ELASTIC_RESULT = '\n[ ! -s "$result" ] || code=$(cat "$result")\nrm -f "$result"'


def slurm_script(job: LaunchConfig) -> str:
    """Return a script for ``sbatch`` that starts one ``lockstep run`` on each node.

    Slurm sends USR1 to the workers two minutes before it ends the job; a job that then exits with 75 is queued again.
    """
    options = shlex.join(_run_options(job))
    if job.is_elastic:  # The maximum is the number of nodes that Slurm allocates.
        options = options.replace(f"--nnodes {job.nnodes}", f'--nnodes "{job.min_nodes}:${{#nodes[@]}}"', 1)
    return _SLURM_SCRIPT.format(
        name=_job_name(job),
        nodes=f"{job.min_nodes}-{job.nodes}" if job.is_elastic else job.nodes,
        start=_SLURM_ELASTIC_START if job.is_elastic else _SLURM_START,
        more="\n#SBATCH --no-kill" if job.is_elastic else "",
        result=_SLURM_ELASTIC_RESULT if job.is_elastic else "",
        workers=job.workers,
        port=_port(job),
        options=options,
        program=shlex.join(_program(job)),
        again=PEER_LOST,
    )


_SUPERVISOR_SECONDS = 10  # For the supervisor to exit after its workers.
_KUBERNETES_SECRET = """\
# First make the secret that the processes of the job prove to each other:
# kubectl create secret generic {name} --from-literal=secret="$(openssl rand -hex 32)"
"""
_KUBERNETES_MANIFEST = """\
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
{spec}"""
_JOBSET_MANIFEST = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  failurePolicy:
    maxRestarts: {restarts}
    rules:
      - name: error-of-the-program
        action: FailJobSet
        onJobFailureReasons:
          - PodFailurePolicy
  replicatedJobs:
    - name: {job}
      replicas: 1
      template:
        spec:
{spec}"""
_JOBSET_JOB = "node"  # The pods are NAME-node-0-0, NAME-node-0-1, ...; the JobSet makes the Service NAME.
_KUBERNETES_JOB = """\
completionMode: Indexed
completions: {nodes}
parallelism: {nodes}
backoffLimit: {failures}
{success}podFailurePolicy:
  rules:
{ignored}    - action: FailJob
      onExitCodes:
        containerName: worker
        operator: In
        values: [{codes}]
template:
  spec:
    {subdomain}restartPolicy: Never
    terminationGracePeriodSeconds: {seconds}
    containers:
      - name: worker
        image: YOUR_REGISTRY/YOUR_IMAGE
        command:{command}
        env:
          - name: LOCKSTEP_SECRET
            valueFrom:
              secretKeyRef:
                name: {name}
                key: secret
        # resources: {{limits: {{nvidia.com/gpu: {workers}}}}}
        volumeMounts:
          - name: shared-memory
            mountPath: /dev/shm
    volumes:
      - name: shared-memory
        emptyDir:
          medium: Memory
"""
# The node of a pod is drained: the pod is replaced and does not count as failed.
_KUBERNETES_IGNORED = """\
    - action: Ignore
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
"""


# From Kubernetes 1.31 on: a node that is not in the last generation must not prevent success.
_KUBERNETES_SUCCESS = """\
successPolicy:
  rules:
    - succeededIndexes: "0"
"""


def kubernetes_manifest(job: LaunchConfig) -> str:
    """Return a manifest for ``kubectl apply``: an Indexed Job with one pod a node, and the headless Service that names the pods.

    A pod whose program has an error ends the job, any other failed pod is replaced. An elastic job is done when node 0 is, as node 0
    ends with the code of the job.
    """
    name = _job_name(job)
    spec = _kubernetes_job(
        job,
        hosts=[f"{name}-{node}.{name}" for node in range(job.nodes)],
        failures=job.nodes * (job.max_restarts + 1),
        success=_KUBERNETES_SUCCESS if job.is_elastic else "",
        ignored=_KUBERNETES_IGNORED,
        subdomain=f"subdomain: {name}\n    ",
    )
    manifest = _KUBERNETES_MANIFEST.format(name=name, port=_port(job), spec=indent(spec, " " * 2))
    return _KUBERNETES_SECRET.format(name=name) + manifest


def jobset_manifest(job: LaunchConfig) -> str:
    """Return a manifest for ``kubectl apply``: a JobSet with one pod a node, which starts all pods anew if one of them fails.

    ``--max-restarts`` is the number of such restarts; the supervisors in the pods make none. A pod whose program has an error ends
    the JobSet.

    Raises:
        OptionError: the number of nodes is a range.
    """
    if job.is_elastic:
        raise OptionError(
            f"--print jobset: a JobSet starts all of its pods anew if one fails, so it needs one number, got --nnodes {job.nnodes}. "
            "Fix: give one number, or print kubernetes."
        )
    name = _job_name(job)
    spec = _kubernetes_job(
        replace(job, max_restarts=0),
        hosts=[f"{name}-{_JOBSET_JOB}-0-{node}.{name}" for node in range(job.nodes)],
        failures=0,
    )
    manifest = _JOBSET_MANIFEST.format(
        name=name, restarts=job.max_restarts, job=_JOBSET_JOB, spec=indent(spec, " " * 10)
    )
    return _KUBERNETES_SECRET.format(name=name) + manifest


def _kubernetes_job(
    job: LaunchConfig, hosts: list[str], failures: int, success: str = "", ignored: str = "", subdomain: str = ""
) -> str:
    """Return the ``spec`` of an Indexed Job that starts ``lockstep run`` on each of these hosts."""
    node = ["--hosts", ",".join(f"{host}:{_port(job)}" for host in hosts), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    command = ["lockstep", "run", *node, *map(_escaped, [*_run_options(job), *_program(job)])]
    return _KUBERNETES_JOB.format(
        name=_job_name(job),
        nodes=job.nodes,
        workers=job.workers,
        command="".join(f"\n          - {json.dumps(word, ensure_ascii=False)}" for word in command),
        codes=f"{USAGE}, {USER_ERROR}",
        failures=failures,
        success=success,
        ignored=ignored,
        subdomain=subdomain,
        seconds=int(job.grace) + _SUPERVISOR_SECONDS,
    )


def _escaped(word: str) -> str:
    """Escape dollars: Kubernetes takes ``$(NAME)`` for a variable and ``$$`` for a dollar."""
    return word.replace("$", "$$")


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
        """Run its workers, and return their exit code."""
        node = ["--hosts", ",".join(hosts), "--node-rank", str(rank)]
        environment = {{**os.environ, "LOCKSTEP_SECRET": secret, "LOCKSTEP_SECRET_FILE": ""}}
        return subprocess.call([sys.executable, "-m", "lockstep.cli", "run", *node, *RUN, *PROGRAM], env=environment)


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
    if job.is_elastic:
        raise OptionError(
            f"--print ray: Ray allocates all nodes of a placement group or none, so it needs one number, got --nnodes {job.nnodes}."
        )
    return _RAY_SCRIPT.format(
        name=_job_name(job),
        nodes=job.nodes,
        workers=job.workers,
        port=_port(job),
        options=_run_options(job),
        program=_program(job),
    )


_TORCHRUN_SECRET = (
    'export LOCKSTEP_SECRET_FILE="${LOCKSTEP_SECRET_FILE:?a file with the secret of the job, the same on all nodes}"\n'
)


def torchrun_commands(job: LaunchConfig) -> str:
    """Return a shell script with one torchrun command a node; the nodes of an elastic job share one command.

    Example:
        >>> print(torchrun_commands(LaunchConfig(("train.py",), workers=2)), end="")
        # node 0
        torchrun --nnodes=1 --nproc-per-node=2 --node-rank=0 --master-addr=127.0.0.1 --master-port=12421 train.py
    """
    if job.is_elastic:
        return f"# each node\n{_TORCHRUN_SECRET}{_torchrun_command(job, _torchrun_rendezvous(job))}\n"
    secret = _TORCHRUN_SECRET if job.nodes > 1 else ""
    commands = (_torchrun_command(job, _torchrun_node(job, node)) for node in range(job.nodes))
    return "".join(f"# node {node}\n{secret}{command}\n" for node, command in enumerate(commands))


def _torchrun_node(job: LaunchConfig, node: int) -> list[str]:
    return [f"--node-rank={node}", f"--master-addr={_torchrun_host(job)}", f"--master-port={_port(job)}"]


def _torchrun_rendezvous(job: LaunchConfig) -> list[str]:
    limits = f"--rdzv-conf=join_timeout={job.start_seconds:.0f},last_call_timeout={job.join_seconds:.0f}"
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-id={_job_name(job)}",
        f"--rdzv-endpoint={_torchrun_host(job)}:{_port(job)}",
        limits,
    ]


def _torchrun_command(job: LaunchConfig, node: list[str]) -> str:
    options = [f"--nnodes={job.nnodes}", f"--nproc-per-node={job.workers}", *node]
    options += [f"--max-restarts={job.max_restarts}"] if job.max_restarts else []
    options += [f"--log-dir={shlex.quote(str(job.log_dir))}"] if job.log_dir is not None else []
    return " ".join(["torchrun", *options, *(["-m"] if job.is_module else []), shlex.join(job.program)])


def _torchrun_host(job: LaunchConfig) -> str:
    if job.coordinator_address is not None:
        return shlex.quote(split_address("coordinator", job.coordinator_address)[0])
    return '"${FIRST_NODE:?the host of node 0}"' if job.nodes > 1 else "127.0.0.1"


def _run_options(job: LaunchConfig) -> list[str]:
    """Return the options of ``lockstep run`` that are the same on each node, without the addresses of the nodes."""
    options = ["-n", str(job.workers), "--nnodes", job.nnodes]
    options += ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []
    if job.is_elastic:
        options += ["--join-seconds", f"{job.join_seconds:g}", "--start-seconds", f"{job.start_seconds:g}"]
    options += ["--timeout", f"{job.timeout:g}"] if job.timeout is not None else []
    options += ["--grace", f"{job.grace:g}"]
    options += ["--allocator", job.allocator]
    options += ["--log-dir", str(job.log_dir)] if job.log_dir is not None else []
    return options + (["--tee"] if job.tee else [])


def _program(job: LaunchConfig) -> list[str]:
    """Return the program and its arguments, the end of the command line."""
    return [*(["-m"] if job.is_module else ["--"]), *job.program]


def _job_name(job: LaunchConfig) -> str:
    """Return a name for the job that every scheduler accepts: a letter, then at most 39 lower-case letters, digits and dashes.

    Example:
        >>> _job_name(LaunchConfig(("experiments/Train_2.py",))), _job_name(LaunchConfig(("2.py",)))
        ('train-2', 'job-2')
    """
    program = job.program[0].rpartition("/")[2].removesuffix(".py")
    name = re.sub("[^a-z0-9]+", "-", program.lower()).strip("-") or "lockstep"
    return (name if name[0].isalpha() else f"job-{name}")[:40].rstrip("-")


def _port(job: LaunchConfig) -> int:
    """Return the port of worker 0."""
    return DEFAULT_PORT if job.coordinator_address is None else split_address("coordinator", job.coordinator_address)[1]


PRINTERS: Mapping[str, Callable[[LaunchConfig], str]] = {
    "slurm": slurm_script,
    "kubernetes": kubernetes_manifest,
    "jobset": jobset_manifest,
    "ray": ray_script,
    "torchrun": torchrun_commands,
}
