"""The same job under Slurm: a script for ``sbatch``, with one ``lockstep run`` on each node."""

import shlex

from lockstep.cluster.exit_codes import PEER_LOST
from lockstep.launch.job import Job
from lockstep.launch.print.common import job_name, port_of, program_of, run_options

__all__ = ["script"]


_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=USR1@120
#SBATCH --requeue
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

# One supervisor on each node; it starts the workers there.
srun --kill-on-bad-exit=1 bash -c 'exec lockstep run --hosts "$hosts" --node-rank "$SLURM_NODEID" "$@"' lockstep \\
    {options} \\
    {program}
code=$?

if [ "$code" -eq {again} ]; then  # Preempted, or a worker was lost: try again.
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def script(job: Job) -> str:
    """The script. Slurm says USR1 to the workers two minutes before it ends the job; who then ends with 75 is queued again."""
    return _SCRIPT.format(
        name=job_name(job),
        nodes=job.nodes,
        workers=job.workers,
        port=port_of(job),
        options=shlex.join(run_options(job)),
        program=shlex.join(program_of(job)),
        again=PEER_LOST,
    )
