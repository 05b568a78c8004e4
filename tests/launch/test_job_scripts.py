"""Job scripts do what ``lockstep run`` would do, as far as a test can check without the scheduler."""

import ast
import importlib.util
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys

import pytest

from lockstep import cli
from lockstep._errors import OptionError
from lockstep.cluster_resolver import KubernetesClusterResolver
from lockstep.distributed.cluster.secret import SECRET, SECRET_FILE
from lockstep.launch.job_scripts import JOB_SCRIPTS
from lockstep.launch.launch_config import LaunchConfig
from tests.launch.block_yaml import documents
from tests.launch.launching import environment, program, run
from tests.support.processes import own_host

pytestmark = pytest.mark.waits

WORDS = ("--lr", "$HOME", "a b", "it's", '"', "é😀", "--", "-m")


def job(path="train.py", **options):
    return LaunchConfig((str(path), *WORDS), **{"workers": 2, "nodes": 2, "max_restarts": 1} | options)


@pytest.mark.parametrize("name", JOB_SCRIPTS)
def test_the_command_prints_and_runs_nothing(name, capsys):
    assert (
        cli.main(["run", "--print", name, "-n", "2", "--nnodes", "2", "--max-restarts", "1", "train.py", *WORDS]) == 0
    )
    assert capsys.readouterr().out == JOB_SCRIPTS[name](job())


@pytest.mark.parametrize("name", ["slurm", "torchrun"])
@pytest.mark.parametrize("options", [{}, {"is_module": True}, {"nodes": 1, "coordinator": "h:5"}, {"min_nodes": 1}])
def test_shell_scripts_are_shell_scripts(name, options):
    done = subprocess.run(
        ["bash", "-n"], input=JOB_SCRIPTS[name](job(**options)), capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stderr) == (0, "")


def command(folder, name, code):
    path = folder / name
    path.write_text("#!/bin/bash\n" + code)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


YAML = ("kubernetes", "jobset", "trainjob")


@pytest.fixture
def slurm(tmp_path):
    """Fake Slurm with two nodes on this machine: ``srun`` starts its command on both and returns the largest code."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command(
        folder,
        "scontrol",
        f'if [ "$1" = show ]; then echo 127.0.0.1; echo localhost; else echo "$@" >> {tmp_path}/queued; fi',
    )
    start = f"printf '%s\\n' \"$@\" > {tmp_path}/flags\n"
    start += (
        'while [[ "$1" == --* ]]; do shift; done; SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@"; one=$?; wait $!; two=$?\n'
    )
    command(folder, "srun", start + "exit $((one > two ? one : two))")
    command(folder, "lockstep", f'exec {sys.executable} -m lockstep.cli "$@"')

    def submit(text):
        variables = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
        variables |= {"HOME": str(tmp_path)}
        (tmp_path / "job.sh").write_text(text)
        return subprocess.run(
            ["bash", tmp_path / "job.sh"], capture_output=True, text=True, timeout=60, env=environment(**variables)
        )

    return submit


@pytest.mark.slow
def test_the_slurm_script_gives_all_nodes_a_secret_that_only_its_user_can_read(slurm, tmp_path):
    body = f"path = Path(os.environ['{SECRET_FILE}'])\nprint(oct(path.stat().st_mode), path.name, path.read_text())"
    secrets = set()
    for _ in range(2):
        done = slurm(JOB_SCRIPTS["slurm"](job(program(tmp_path, body), workers=1)))
        assert done.returncode == 0, done.stderr
        seen = {line.split("] ", 1)[1] for line in done.stdout.splitlines()}
        assert len(seen) == 1
        found = re.fullmatch("0o100600 .lockstep-secret-7 ([0-9a-f]{64})", seen.pop())
        assert found is not None
        secrets.add(found[1])
    assert len(secrets) == 2
    assert not (tmp_path / ".lockstep-secret-7").exists()


@pytest.mark.slow
def test_the_slurm_script_runs_the_program_on_each_node(slurm, tmp_path):
    path = program(tmp_path, "print(json.dumps([os.environ['TF_CONFIG'], sys.argv[1:]]))")
    done = slurm(JOB_SCRIPTS["slurm"](job(path)))
    assert done.returncode == 0, done.stderr
    seen = dict(line.removeprefix("[worker ").split("] ", 1) for line in done.stdout.splitlines())
    hosts = [f"{host}:{port}" for host in ("127.0.0.1", "localhost") for port in (12421, 12422)]
    assert sorted(seen) == ["0", "1", "2", "3"]
    for rank, line in seen.items():
        config, words = json.loads(line)
        assert json.loads(config) == {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": int(rank)}}
        assert words == list(WORDS)
    assert not (tmp_path / "queued").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("code", "is_queued"), [(75, True), (13, False)])
def test_a_slurm_job_whose_workers_ask_for_it_is_queued_again(slurm, tmp_path, code, is_queued):
    done = slurm(JOB_SCRIPTS["slurm"](job(program(tmp_path, f"sys.exit({code})"), max_restarts=0)))
    assert done.returncode == code
    assert (tmp_path / "queued").exists() == is_queued


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 9])
def test_a_slurm_job_that_may_go_on_with_fewer_nodes_ends_with_the_code_of_node_0(slurm, tmp_path, code):
    command(tmp_path / "bin", "scontrol", f"printf '%s\\n' {own_host()} {own_host()}")
    body = "supervisor = Path(f'/proc/{os.getppid()}/stat').read_text().rpartition(')')[2].split()[1]\n"
    body += "if rank == 1: os.kill(int(supervisor), signal.SIGKILL)\n"
    body += "if os.environ['WORLD_SIZE'] == '2': time.sleep(100)\n"
    path = program(tmp_path, body + f"print('alone'); sys.exit({code})")
    done = slurm(JOB_SCRIPTS["slurm"](job(path, workers=1, min_nodes=1, nodes=3, join_seconds=3)))
    assert (done.returncode, done.stdout) == (code, "[worker 0] alone\n"), done.stderr


def test_engines_that_start_all_nodes_at_once_need_one_number_of_nodes():
    with pytest.raises(OptionError, match=r"--print ray: Ray allocates all nodes of a placement group or none.*1:2"):
        JOB_SCRIPTS["ray"](job(min_nodes=1))
    with pytest.raises(OptionError, match=r"--print jobset: a JobSet starts all of its pods anew.*1:2\. Fix: give one"):
        JOB_SCRIPTS["jobset"](job(min_nodes=1))
    with pytest.raises(OptionError, match=r"--print trainjob: the JobSet of a TrainJob starts all of its pods anew"):
        JOB_SCRIPTS["trainjob"](job(min_nodes=1))
    with pytest.raises(OptionError, match=r"--print skypilot: SkyPilot allocates all nodes .*1:2\. Fix: give one"):
        JOB_SCRIPTS["skypilot"](job(min_nodes=1))


def test_kubernetes_and_torchrun_are_told_that_there_may_be_fewer_nodes():
    _, batch = documents(JOB_SCRIPTS["kubernetes"](job(min_nodes=1)))
    assert batch["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    words = batch["spec"]["template"]["spec"]["containers"][0]["command"]
    assert words[words.index("--nnodes") + 1] == "1:2"
    _, secret, command = JOB_SCRIPTS["torchrun"](job(min_nodes=1, coordinator="a:5")).splitlines()
    assert secret.startswith('export LOCKSTEP_SECRET_FILE="${LOCKSTEP_SECRET_FILE:?')
    words = shlex.split(command)
    assert words[:5] == ["torchrun", "--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=train"]
    assert words[5:7] == ["--rdzv-endpoint=a:5", "--rdzv-conf=join_timeout=600,last_call_timeout=30"]


def test_the_slurm_script_asks_slurm_for_what_is_needed():
    asked = [
        line.split(maxsplit=1)[1] for line in JOB_SCRIPTS["slurm"](job()).splitlines() if line.startswith("#SBATCH")
    ]
    for option in ("--nodes=2", "--ntasks-per-node=1", "--signal=USR1@120", "--requeue", "--job-name=train"):
        assert option in asked
    assert signal.SIGUSR1.name == "SIGUSR1"


@pytest.mark.parametrize("options", [{}, {"is_module": True, "max_restarts": 0}, {"hosts": ("x:7", "y")}])
def test_the_kubernetes_manifest_says_what_kubernetes_needs(options):
    service, batch = documents(JOB_SCRIPTS["kubernetes"](job(**options)))
    port = 7 if "hosts" in options else 12421
    assert (service["apiVersion"], service["kind"], batch["apiVersion"], batch["kind"]) == (
        "v1",
        "Service",
        "batch/v1",
        "Job",
    )
    name = batch["metadata"]["name"]
    assert service["metadata"]["name"] == name == batch["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["ports"] == [{"name": "coordinator", "port": port}]
    spec = batch["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # As podFailurePolicy demands.
    assert pod["terminationGracePeriodSeconds"] > 30
    (container,) = pod["containers"]
    assert_codes(spec, container["name"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (variable,) = container["env"]
    assert variable == {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": name, "key": "secret"}}}
    words = [word.replace("$$", "$") for word in container["command"]]
    assert words[:3] == ["lockstep", "run", "--hosts"]
    assert words[3] == f"{name}-0.{name}:{port},{name}-1.{name}:{port}"
    assert words[4:6] == ["--node-rank", "$(JOB_COMPLETION_INDEX)"]
    assert words[-len(WORDS) :] == list(WORDS)


def assert_codes(spec, container):
    """A pod that was drained or ended with 75 does not count as failed, one whose program has an error ends the Job."""
    drained, *rules = spec["podFailurePolicy"]["rules"]
    assert drained == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert [(rule["action"], rule["onExitCodes"]["values"]) for rule in rules] == [
        ("Ignore", [75]),
        ("FailJob", [2, 13]),
    ]
    assert {rule["onExitCodes"]["containerName"] for rule in rules} == {container}


def job_in(name, **options):
    """The last document of a manifest, and the specification of its Indexed Job."""
    *_, first, document = [None, *documents(JOB_SCRIPTS[name](job(**options)))]
    if name == "kubernetes":
        return document, document["spec"]
    jobset = first["spec"]["template"]["spec"] if name == "trainjob" else document["spec"]
    return document, jobset["replicatedJobs"][0]["template"]["spec"]


def command_in(name, **options):
    """The command of the container that a manifest starts in each pod."""
    document, spec = job_in(name, **options)
    process = document["spec"]["trainer"] if name == "trainjob" else spec["template"]["spec"]["containers"][0]
    return process["command"]


def assert_fails_after_an_error(jobset):
    (rule,) = jobset["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])  # As the webhook of JobSet demands.


def test_the_jobset_manifest_says_what_jobset_needs():
    document, spec = job_in("jobset", max_restarts=3)
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert_fails_after_an_error(document["spec"])
    assert (spec["completionMode"], spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (
        "Indexed",
        2,
        2,
        0,
    )
    assert_codes(spec, "worker")
    assert "--max-restarts" not in command_in("jobset", max_restarts=3)


def test_pods_of_a_jobset_have_the_names_that_the_resolver_knows():
    document, spec = job_in("jobset")
    (replicated,) = document["spec"]["replicatedJobs"]
    environ = {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": str(spec["completions"]), "JOB_INDEX": "0"}
    environ |= {"JOBSET_NAME": document["metadata"]["name"], "REPLICATED_JOB_NAME": replicated["name"]}
    environ |= {"REPLICATED_JOB_REPLICAS": str(replicated["replicas"])}
    assert tuple(command_in("jobset")[3].split(",")) == KubernetesClusterResolver(environ).group().addresses
    assert command_in("trainjob") == command_in("jobset")  # The Trainer makes a JobSet with the name of the TrainJob.


def test_the_trainjob_manifest_says_what_kubeflow_trainer_needs():
    runtime, trainjob = documents(JOB_SCRIPTS["trainjob"](job(max_restarts=3)))
    assert {each["apiVersion"] for each in (runtime, trainjob)} == {"trainer.kubeflow.org/v1alpha1"}
    assert (runtime["kind"], trainjob["kind"]) == ("TrainingRuntime", "TrainJob")
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "jax": {}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert trainjob["spec"]["runtimeRef"] == reference
    jobset = runtime["spec"]["template"]["spec"]
    assert jobset["failurePolicy"]["maxRestarts"] == 3
    assert_fails_after_an_error(jobset)
    (replicated,) = jobset["replicatedJobs"]
    # The webhook of TrainingRuntimes demands these.
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    assert_codes(replicated["template"]["spec"], "node")
    trainer = trainjob["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    assert [variable["name"] for variable in trainer["env"]] == [SECRET]  # Variables of JAX are refused there.
    assert "--max-restarts" not in trainer["command"]


@pytest.mark.slow
@pytest.mark.parametrize("name", YAML)
def test_the_command_in_the_manifest_is_one_that_runs(tmp_path, name):
    path = program(tmp_path, "print(json.dumps(sys.argv[1:]))")
    words = [word.replace("$$", "$") for word in command_in(name, path=path, nodes=1)[2:]]
    done = run(*(word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in words))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[worker {rank}] {json.dumps(WORDS)}" for rank in range(2)]


IMAGE = "registry#team/image:1"


@pytest.mark.slow
@pytest.mark.parametrize("mounts", [None, "/data:/data:ro,/a b:/c"])
def test_the_slurm_script_starts_the_supervisors_in_a_container(slurm, tmp_path, mounts):
    path = program(tmp_path, "print(os.environ['LOCKSTEP_SECRET_FILE'])")
    done = slurm(JOB_SCRIPTS["slurm"](job(path, workers=1, container_image=IMAGE, container_mounts=mounts)))
    assert done.returncode == 0, done.stderr
    here, secret = os.getcwd(), tmp_path / ".lockstep-secret-7"
    flags = (tmp_path / "flags").read_text().splitlines()[:4]
    assert flags == [
        f"--container-image={IMAGE}",
        f"--container-workdir={here}",
        f"--container-mounts={here}:{here}{f',{mounts}' if mounts else ''},{secret}:{secret}:ro",
        "--kill-on-bad-exit=1",
    ]


def test_an_elastic_slurm_job_in_a_container_has_its_result_where_the_container_sees_it():
    text = JOB_SCRIPTS["slurm"](job(min_nodes=1, container_image=IMAGE))
    assert 'result=$(mktemp -p "$PWD") && export result' in text
    assert 'srun "${container[@]}" --no-kill' in text
    assert "{" + "f" not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=20).returncode == 0


@pytest.mark.parametrize("kind", [*YAML, "skypilot"])
def test_a_job_may_be_named_as_a_flag_of_yaml(kind):
    text = JOB_SCRIPTS[kind](job("on.py", container_image=IMAGE))
    assert not re.search(r"(?m): on$", text)
    assert 'name: "on"' in text


def test_other_scripts_name_the_image():
    for name in YAML:
        assert f'image: "{IMAGE}"' in JOB_SCRIPTS[name](job(container_image=IMAGE))
    assert f'image_id: "docker:{IMAGE}"' in JOB_SCRIPTS["skypilot"](job(container_image=IMAGE))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--container-image", "i"], "--container-image: it is for job scripts that start containers"),
        (
            ["--container-image", "i", "--print", "ray"],
            "--container-image: it is for job scripts that start containers",
        ),
        (["--container-mounts", "a:b", "--print", "slurm"], "--container-mounts: it is for --print slurm with"),
        (["--container-mounts", "a:b", "--container-image", "i", "--print", "jobset"], "--container-mounts: it is for"),
    ],
)
def test_a_container_needs_a_script_that_starts_one(options, message, capsys):
    assert cli.main(["run", *options, "train.py"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_skypilot_task_runs_the_program_on_each_node(tmp_path):
    path = program(tmp_path, "print(json.dumps([os.environ['TF_CONFIG'], sys.argv[1:]]))")
    text = JOB_SCRIPTS["skypilot"](job(path, max_restarts=3))
    head, script = text.split("\nrun: |\n")
    for line in ("num_nodes: 2", "    max_restarts_on_errors: 3", "    recover_on_exit_codes: [75]"):
        assert line in "\n".join(line.partition("  #")[0].rstrip() for line in head.splitlines())
    assert "--max-restarts" not in script
    folder = tmp_path / "bin"
    folder.mkdir()
    command(folder, "lockstep", f'exec {sys.executable} -m lockstep.cli "$@"')
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", SECRET: "s" * 32}
    variables["SKYPILOT_NODE_IPS"] = f"{own_host()}\n{own_host()}"
    started = [
        subprocess.Popen(
            ["bash", "-c", re.sub("^  ", "", script, flags=re.MULTILINE)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(**variables, SKYPILOT_NODE_RANK=str(rank)),
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    seen = dict(line.removeprefix("[worker ").split("] ", 1) for text in printed for line in text.splitlines())
    assert sorted(seen) == ["0", "1", "2", "3"]
    for rank, line in seen.items():
        config, words = json.loads(line)
        assert json.loads(config)["task"] == {"type": "worker", "index": int(rank)}
        assert words == list(WORDS)


def test_torchrun_gets_a_command_for_each_node():
    text = JOB_SCRIPTS["torchrun"](job(nodes=2, hosts=("a", "b"), is_module=True))
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("torchrun")]
    assert len(commands) == 2
    for node, words in enumerate(commands):
        assert words[:4] == ["torchrun", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}"]
        assert words[4:7] == ["--master-addr=a", "--master-port=12421", "--max-restarts=1"]
        assert words[7:] == ["-m", "train.py", *WORDS]


@pytest.mark.parametrize(("seconds", "word"), [(1234567.0, "1234567"), (0.25, "0.25"), (1e-5, "1e-05")])
def test_scripts_have_limits_as_they_were_given(seconds, word):
    words = shlex.split(JOB_SCRIPTS["slurm"](job(timeout=seconds)))
    assert words[words.index("--timeout") + 1] == word


@pytest.mark.parametrize("words", [["--timeout", "5"], ["--grace", "5"], ["--allocator", "system"]])
def test_torchrun_refuses_what_it_does_not_have(words, capsys):
    assert cli.main(["run", "--print", "torchrun", *words, "train.py"]) == 2
    said = capsys.readouterr().err
    assert f"--print torchrun: torchrun has no counterpart of {words[0]}. Fix: omit it, or print another script" in said


def test_torchrun_writes_logs_where_lockstep_run_would(tmp_path):
    for options, flag in (({}, "--redirects=3"), ({"tee": True}, "--tee=3")):
        words = shlex.split(JOB_SCRIPTS["torchrun"](job(nodes=1, log_dir=tmp_path, **options)))
        assert words[words.index(f"--log-dir={tmp_path}") + 1] == flag


def test_torchrun_commands_stop_where_nobody_has_said_where_worker_0_is():
    for variables, missing in (({}, "a file with the secret"), ({SECRET_FILE: "secret"}, "the host of node 0")):
        done = subprocess.run(
            ["bash", "-c", JOB_SCRIPTS["torchrun"](job())],
            capture_output=True,
            text=True,
            timeout=20,
            env=environment(**variables),
        )
        assert done.returncode != 0
        assert missing in done.stderr


def test_the_ray_script_is_python():
    tree = ast.parse(JOB_SCRIPTS["ray"](job()))
    names = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert [ast.literal_eval(names[name]) for name in ("NODES", "WORKERS", "PORT")] == [2, 2, 12421]
    assert ast.literal_eval(names["PROGRAM"]) == ["--", "train.py", *WORDS]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("code", [0, 13])
def test_the_ray_script_runs_a_job_of_two_workers(tmp_path, code):
    body = (
        f"write(f'{{rank}}', json.dumps([os.environ['TF_CONFIG'], sys.argv[1:]]))\nif rank and {code}: raise ValueError"
    )
    path = program(tmp_path, body + "\nwait_for(lambda: is_there('0') and is_there('1'))")
    (tmp_path / "submit.py").write_text(JOB_SCRIPTS["ray"](job(path, workers=1, max_restarts=0)))
    done = subprocess.run(
        [sys.executable, tmp_path / "submit.py"], capture_output=True, text=True, timeout=200, env=environment()
    )
    assert done.returncode == code, done.stderr
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    addresses = json.loads(seen[0][0])["cluster"]["worker"]
    assert len(set(addresses)) == 2
    for rank, (config, words) in enumerate(seen):
        assert json.loads(config) == {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        assert words == list(WORDS)
