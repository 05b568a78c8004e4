"""The same job under Slurm: a script for ``sbatch``, with one ``lockstep run`` on each node."""

import shlex

from lockstep.distributed.cluster.exit_codes import PEER_LOST
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.templates.common import job_name, port_of, program_of, run_options

__all__ = ["script"]


_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=USR1@120
#SBATCH --requeue{more}
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
# What depends on your cluster:
##SBATCH --partition=PARTITION
##SBATCH --time=04:00:00
##SBATCH --gpus-per-node={workers}

set -uo pipefail
# source YOUR_ENVIRONMENT/bin/activate

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

_TOGETHER = """\
# One supervisor on each node; it starts the workers there.
srun --kill-on-bad-exit=1 bash -c 'exec lockstep run --hosts "$hosts" --node-rank "$SLURM_NODEID" "$@"' lockstep"""

# srun ends with the largest code of all; that of the job is node 0's, on whose machine this script runs. A signal to all
# processes of a step must not end the shell before the supervisor.
_MEETING = """\
result=$(mktemp) && export result
# One supervisor on each node; it starts the workers there, and those that are left go on when a node fails.
srun --no-kill --kill-on-bad-exit=0 bash -c 'trap : TERM INT HUP USR1
    lockstep run --hosts "$hosts" --node-rank "$SLURM_NODEID" "$@"
    code=$?; [ "$SLURM_NODEID" != 0 ] || echo "$code" > "$result"; exit "$code"' lockstep"""
_RESULT = '\n[ ! -s "$result" ] || code=$(cat "$result")\nrm -f "$result"'


def script(job: LaunchConfig) -> str:
    """The script. Slurm says USR1 to the workers two minutes before it ends the job; who then ends with 75 is queued again."""
    options = shlex.join(run_options(job))
    if job.is_elastic:  # As many as Slurm gives at most.
        options = options.replace(f"--nnodes {job.nodes_said}", f'--nnodes "{job.least_nodes}:${{#nodes[@]}}"', 1)
    return _SCRIPT.format(
        name=job_name(job),
        nodes=f"{job.least_nodes}-{job.nodes}" if job.is_elastic else job.nodes,
        start=_MEETING if job.is_elastic else _TOGETHER,
        more="\n#SBATCH --no-kill" if job.is_elastic else "",
        result=_RESULT if job.is_elastic else "",
        workers=job.workers,
        port=port_of(job),
        options=options,
        program=shlex.join(program_of(job)),
        again=PEER_LOST,
    )
