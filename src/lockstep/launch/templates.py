"""Job scripts for Slurm, SkyPilot, Ray and torchrun that do what ``lockstep run`` would do, one function each, and the table of all printers.

Printed scripts stay in use for years: the commands, options and environment variables in them must keep working.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace

from lockstep._errors import PEER_LOST, OptionError
from lockstep.distributed.cluster.addresses import split_address
from lockstep.launch.kubernetes_templates import jobset_manifest, kubernetes_manifest, trainjob_manifest
from lockstep.launch.launch_config import LaunchConfig, first_port, job_name, program_words, run_options

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
name: {name}
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
    if job.is_elastic:
        raise OptionError(
            f"--print skypilot: SkyPilot allocates all nodes of a job or none, so it needs one number, got --nnodes {job.nnodes}. "
            "Fix: give one number."
        )
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
    options += [f"--log-dir={shlex.quote(str(job.log_dir))}"] if job.log_dir is not None else []
    return " ".join(["torchrun", *options, *(["-m"] if job.is_module else []), shlex.join(job.program)])


def _torchrun_host(job: LaunchConfig) -> str:
    if job.coordinator_address is not None:
        return shlex.quote(split_address("coordinator", job.coordinator_address)[0])
    return '"${FIRST_NODE:?the host of node 0}"' if job.nodes > 1 else "127.0.0.1"


PRINTERS: Mapping[str, Callable[[LaunchConfig], str]] = {
    "slurm": slurm_script,
    "kubernetes": kubernetes_manifest,
    "jobset": jobset_manifest,
    "trainjob": trainjob_manifest,
    "skypilot": skypilot_task,
    "ray": ray_script,
    "torchrun": torchrun_commands,
}
