"""A cluster of Slurm's own daemons on this machine: a controller and two nodes, at addresses and ports of their own."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.support.processes import own_host

COMMANDS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
LIMIT = 120  # seconds, far more than any answer takes

# A requeued job is eligible when the credential of its last run has expired. A node without its daemon is down after SlurmdTimeout.
CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=5
KillWait=30
MailProg=/bin/true
NodeName={nodes[0]} NodeHostname=localhost Port={ports[1]} State=UNKNOWN
NodeName={nodes[1]} NodeHostname=localhost Port={ports[2]} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """What keeps a cluster from being started here; None if nothing does."""
    absent = [command for command in COMMANDS if shutil.which(command) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurmctld slurmd slurm-client"
    return None if os.getuid() == 0 else "only root can start Slurm's daemons"


def free_ports(count):
    """Ports that are free now."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


class SlurmCluster:
    """The daemons. The name of a node is its address, a loopback address that no other test has."""

    def __init__(self, folder):
        self.folder, self.nodes = folder, [own_host(), own_host()]
        for name in ("state", *(f"spool.{node}" for node in self.nodes)):
            (folder / name).mkdir()
        config = CONFIG.format(folder=folder, nodes=self.nodes, ports=free_ports(3))
        (folder / "slurm.conf").write_text(config)
        self.environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = {}
        self._start("controller", "slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)

    def start_node(self, node):
        """Start the daemon of a node."""
        self._start(node, "slurmd", "-D", "-N", node)

    def lose_node(self, node):
        """Kill the daemon of a node and all that it has started, as if the machine had lost its power."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait(LIMIT)
        for pid in processes_on(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def call(self, *command):
        """Run a command of Slurm's; gives what it prints."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=self.environ, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, script):
        """Submit a job; gives its number."""
        (self.folder / "job.sh").write_text(script)
        return re.fullmatch(r"Submitted batch job (\d+)\n", self.call("sbatch", "job.sh"))[1]

    def state_of(self, job):
        """What ``scontrol`` knows of a job, by name."""
        return dict(word.split("=", 1) for word in self.call("scontrol", "show", "job", job).split() if "=" in word)

    def wait_for(self, condition, limit=LIMIT):
        """Wait until a condition holds."""
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.2)

    @property
    def said(self):
        """All output: of jobs, and of the daemons."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def close(self):
        for node in self.nodes:
            if node in self._daemons:
                self.lose_node(node)
        self._daemons["controller"].kill()
        self._daemons["controller"].wait(LIMIT)

    def _start(self, name, *command):
        with (self.folder / f"{name}.out").open("a") as output:
            self._daemons[name] = subprocess.Popen(command, stdout=output, stderr=output, env=self.environ)


def processes_on(node):
    """Numbers of the processes that Slurm has started on a node, and of the ``slurmstepd`` that started them, these first."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SLURMD_NODENAME={node}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    steps = {parent for parent in found.values() if name_of(parent).startswith("slurmstepd")}
    return [*steps, *found]


def name_of(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""
