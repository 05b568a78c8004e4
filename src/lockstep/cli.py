"""The command ``lockstep``: one function a subcommand, which imports its modules when it runs.

Words in the options of ``lockstep run`` may be joined by ``-`` or, as for torchrun, by ``_``.
"""

import argparse
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lockstep._errors import CheckpointError, LockstepError, OptionError, install_extra, whole_number
from lockstep._version import __version__
from lockstep.launch.job_scripts import JOB_SCRIPTS
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.worker_environment import ALLOCATORS

EXPORT_FORMATS = ("npz", "safetensors", "orbax")  # Those of checkpoint/export_formats.py, whose import takes long.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default the process's words after ``lockstep``, and return the exit code.

    0: success. 1: a check failed (numbers, a checkpoint, a finding of the doctor), nothing could be measured, or code is left to
    translate. 2: wrong usage. Otherwise the exit code of a worker.

    Example:
        >>> from lockstep import cli
        >>> cli.main([])  # doctest: +ELLIPSIS
        usage: lockstep ...
        2
    """
    parser = _parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    takes_script = words[:1] in (["scale"], ["plan"])
    separator = words.index("--") if takes_script and "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:separator])
    if unknown:
        hint = "; give arguments of the script last, after --" if takes_script else ""
        getattr(options, "parser", parser).error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    options.script_arguments = words[separator + 1 :]
    if words[:1] == ["run"]:
        options.arguments = _with_separator(words, options)
    if "run" not in options:
        parser.print_help()
        return 2
    try:
        return int(options.run(options))
    except LockstepError as error:
        print(f"lockstep {words[0]}: {error}", file=sys.stderr)
        return 2


def _with_separator(words: list[str], options: argparse.Namespace) -> list[str]:
    """Return the arguments of the script with a ``--`` directly after it, which argparse drops."""
    end = len(words) - len(options.arguments)
    is_dropped = words[end - 2 : end] == [options.script, "--"]
    return ["--", *options.arguments] if is_dropped else options.arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep", description="Train Keras models on many devices, exactly.")
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    commands = parser.add_subparsers(title="commands")
    demo = commands.add_parser("demo", help="train on two replicas and check the numbers against one device")
    demo.add_argument("--data", choices=("digits", "mnist"), default="digits", help="digits ship with scikit-learn")
    demo.add_argument("--replicas", type=int, default=2, help="number of replicas (default: 2)")
    demo.add_argument("--devices", nargs="+", metavar="NAME", help="for example cpu:0 cpu:1 (default: all)")
    demo.add_argument("--epochs", type=int, help="passes over the data (default: 10, for mnist 2)")
    demo.add_argument("--output", default="demo_output", metavar="DIR", help="folder for curves.png")
    demo.set_defaults(run=_demo)
    run = commands.add_parser("run", help="run a program on several workers, on one or several machines")
    _add_run(run)
    run.set_defaults(run=_run)
    test = commands.add_parser("test", help="check all-reduce between every pair of workers, and measure its speed")
    text = "start N workers on this machine (default: this process is a worker that a scheduler started)"
    test.add_argument("-n", type=int, metavar="N", help=text)
    test.set_defaults(run=_test)
    scale = commands.add_parser("scale", help="measure how a script's model scales with devices and batch sizes")
    _add_scale(scale)
    scale.set_defaults(run=_scale)
    text = "estimate memory and speed of a script's training step on hardware that you do not have"
    plan = commands.add_parser("plan", help=text)
    _add_plan(plan)
    plan.set_defaults(run=_plan)
    environment = commands.add_parser("env", help="describe this machine for a bug report")
    environment.set_defaults(run=_env)
    _add_inspection(commands)
    _add_checkpoint(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)  # For its usage in an error.
    return parser


def _add_inspection(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "find what makes a script's training wrong or slow without an error"
    doctor = commands.add_parser("doctor", help=text)
    doctor.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    doctor.add_argument("script", metavar="SCRIPT", help="Python program; it runs up to its first fit")
    doctor.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    doctor.set_defaults(run=_doctor)
    migrate = commands.add_parser("migrate", help="turn a tf.distribute or tf.keras script into a Lockstep one")
    migrate.add_argument("scripts", nargs="+", metavar="FILE", help="Python files")
    migrate.add_argument("--write", action="store_true", help="change the files (default: show the difference)")
    text = "run the new program up to its first fit, and check it as lockstep doctor does"
    migrate.add_argument("--check", action="store_true", help=text)
    migrate.set_defaults(run=_migrate)
    top = commands.add_parser("top", help="show what the workers of a running job do")
    top.add_argument("directory", metavar="RUN_DIR", help="folder of its BackupAndRestore or its TensorBoard")
    text = "print it once (the default if the output is not a terminal)"
    top.add_argument("--once", action="store_true", help=text)
    text = "seconds between two updates (default: 1)"
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help=text)
    top.set_defaults(run=_top)


def _add_scale(scale: argparse.ArgumentParser) -> None:
    measuring = scale.add_argument_group("measurement")
    text = "numbers of devices (default: 1,2)"
    measuring.add_argument("--devices", type=_parse_numbers, default=(1, 2), metavar="1,2", help=text)
    text = "global batches (default: 64,128,256,512)"
    measuring.add_argument("--batch", type=_parse_numbers, default=(64, 128, 256, 512), metavar="64,128", help=text)
    measuring.add_argument("--epochs", type=int, default=1, metavar="N", help="epochs of each setting (default: 1)")
    measuring.add_argument("--rows", type=int, metavar="N", help="use at most N rows (default: all)")
    text = "seconds for each setting (default: 600)"
    measuring.add_argument("--limit", type=float, default=600.0, metavar="S", help=text)
    predicting = scale.add_argument_group("prediction, for up to 1,024 devices")
    text = "between machines: GB/s, or 10GbE, 100GbE, infiniband, nvlink, pcie (default: 100GbE)"
    predicting.add_argument("--bandwidth", type=_parse_number_or_name, default="100GbE", metavar="B", help=text)
    text = "between machines in µs (default: that of the named network, else 30)"
    predicting.add_argument("--latency", type=float, metavar="US", help=text)
    text = "devices in a machine (default: 8 accelerators, or 1 CPU)"
    predicting.add_argument("--devices-per-machine", type=int, metavar="N", help=text)
    scale.add_argument("--html", default="scaling.html", metavar="FILE", help="HTML report (default: scaling.html)")
    scale.add_argument("--json", metavar="FILE", help="write all figures as JSON")
    text = "a Python program that calls fit; its arguments stand last, after --"
    scale.add_argument("script", metavar="SCRIPT", help=text)


def _add_plan(plan: argparse.ArgumentParser) -> None:
    text = "targets, such as h100:8 (a number of GPUs), v5e:2x4 (a slice of TPUs) or cpu:4"
    plan.add_argument(
        "--for", dest="hardware", type=_parse_names, action="extend", default=[], metavar="A,B", help=text
    )
    text = "global batches (default: that of the script)"
    plan.add_argument("--batch", type=_parse_numbers, default=(), metavar="64,128", help=text)
    text = "replicated, optimizer, variables, recompute, model, model-recompute, or auto for all (default: auto)"
    plan.add_argument("--strategy", default="auto", metavar="A,B", help=text)
    text = "price per hour of a target; may be repeated"
    plan.add_argument("--price", type=_parse_price, action="append", default=[], metavar="TARGET=PRICE", help=text)
    text = "between machines of GPUs: GB/s, or 10GbE, 100GbE, infiniband, nvlink, pcie (default: 100GbE)"
    plan.add_argument("--bandwidth", type=_parse_number_or_name, default="100GbE", metavar="B", help=text)
    plan.add_argument("--hardware-file", metavar="FILE", help="TOML with further accelerators")
    plan.add_argument("--no-search", dest="search", action="store_false", help="do not search for the largest batch")
    text = "seconds for each target and strategy (default: 1800)"
    plan.add_argument("--limit", type=float, default=1800.0, metavar="S", help=text)
    text = "memory limit for each target and strategy (default: none)"
    plan.add_argument("--memory", type=float, metavar="GB", help=text)
    text = "compilers that run at once (default: from cores and memory)"
    plan.add_argument("--jobs", type=int, metavar="N", help=text)
    text = "measure steps on the devices of this machine, compare, and keep the ratio for later plans"
    plan.add_argument("--check", action="store_true", help=text)
    plan.add_argument("--html", metavar="FILE", help="write a page with charts")
    plan.add_argument("--json", metavar="FILE", help="write all figures as JSON")
    text = "a Python program that calls fit; its arguments stand last, after --"
    plan.add_argument("script", metavar="SCRIPT", help=text)


def _parse_price(text: str) -> tuple[str, float]:
    name, _, price = text.rpartition("=")
    try:
        return name, float(price)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected TARGET=PRICE such as h100:8=24, got {text!r}") from None


def _parse_names(text: str) -> list[str]:
    return text.split(",")


def _parse_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers such as 1,2, got {text!r}") from None


def _parse_number_or_name(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _add_checkpoint(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    checkpoint = commands.add_parser("checkpoint", help="list checkpoints, verify and sign them, export and import")
    actions = checkpoint.add_subparsers(title="actions", required=True)
    for name, run, text in (
        ("show", _show, "list the checkpoints of a directory"),
        ("verify", _verify, "read every array, and check signatures; the exit code is 1 if any is damaged"),
        ("sign", _sign, "sign checkpoints that you trust with the key of LOCKSTEP_CHECKPOINT_KEY_FILE"),
        ("export", _export, "write a checkpoint, or arrays of it, for other programs"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("directory", metavar="DIR", help="directory of all checkpoints, or of one")
        action.set_defaults(run=run)
        if name == "show":
            action.add_argument("-v", "--verbose", action="store_true", help="also list the arrays")
        if name == "export":
            _add_export(action)
    text = "write an export of a whole checkpoint as a checkpoint again, bit for bit"
    action = actions.add_parser("import", help=text)
    action.add_argument("export", metavar="EXPORT", help="file or directory that 'lockstep checkpoint export' wrote")
    action.add_argument("directory", metavar="DIR", help="directory of all checkpoints; it is made if it is not there")
    action.add_argument("--overwrite", action="store_true", help="replace a checkpoint of the same step")
    action.set_defaults(run=_import)


def _add_export(action: argparse.ArgumentParser) -> None:
    action.add_argument("output", metavar="OUTPUT", help="output file; for orbax, a new directory")
    text = "of the output (default: by its ending, else npz); safetensors and orbax need packages"
    action.add_argument("--format", choices=EXPORT_FORMATS, help=text)
    action.add_argument("--step", type=int, help="step of the checkpoint (default: the newest good one)")
    text = "names of arrays, for example '*trainable/*' for weights; such an export cannot be imported"
    action.add_argument("--only", default="*", metavar="PATTERN", help=text)
    action.add_argument("--overwrite", action="store_true", help="replace an existing file")


def _demo(options: argparse.Namespace) -> int:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # This process has not imported Keras yet.
    from lockstep.tools.demo import run_demo

    default = 10 if options.data == "digits" else 2
    epochs = default if options.epochs is None else options.epochs
    try:
        matches = run_demo(options.data, options.replicas, options.devices, epochs, options.output)
    except FileNotFoundError as error:
        print(f"lockstep demo: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("matplotlib", "sklearn"):
            raise
        print(f"lockstep demo: needs {error.name}. Fix: {install_extra('demo')}.", file=sys.stderr)
        return 2
    return 0 if matches else 1


def _run(options: argparse.Namespace) -> int:
    from lockstep.launch.supervisor import supervise

    job = _config_from_options(options)
    if options.printer is not None:
        print(JOB_SCRIPTS[options.printer](job), end="")
        return 0
    output, messages = (
        io.FileIO(os.devnull, "w")
        if file is None
        else io.FileIO(file.fileno(), "w", closefd=False)  # None: it is closed.
        for file in (sys.stdout, sys.stderr)
    )
    return supervise(job, os.environ, output, messages)


def _test(options: argparse.Namespace) -> int:
    if options.n is not None:
        return main(["run", "-n", str(whole_number("-n", options.n)), "-m", "lockstep.tools.cluster_check"])
    from lockstep.tools import cluster_check

    return cluster_check.main()


def _doctor(options: argparse.Namespace) -> int:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    from lockstep.doctor.base import Report
    from lockstep.tools.doctor_command import examine_script, look_at_cluster, tell_report

    def tell(run: Callable[[], Report]) -> int:
        failure = f"{options.script} failed before or in its first fit."
        return tell_report(run, "lockstep doctor", failure, show)

    def show(report: Report) -> None:
        print(json.dumps(report.as_dict(), indent=2) if options.json else report)

    def run() -> Report:
        network, variables = look_at_cluster(os.environ)
        for name in variables:  # The script runs in this process alone and must not wait for other workers.
            os.environ.pop(name, None)
        return examine_script(options.script, options.arguments, tell, network, is_quiet=options.json)

    return tell(run)


def _scale(options: argparse.Namespace) -> int:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # This process has not imported Keras yet.
    from lockstep.tools.scaling.api import scale_script
    from lockstep.tools.scaling.prediction import PredictionOptions
    from lockstep.tools.scaling.results import Budget
    from lockstep.tools.scaling.terminal import render

    command = shlex.join(["lockstep", *sys.argv[1:]])
    budget = Budget(options.epochs, options.rows, options.limit)
    prediction = PredictionOptions(options.bandwidth, options.latency, options.devices_per_machine)
    setting = options.script, options.script_arguments, options.devices, options.batch, budget, prediction
    report = scale_script(*setting, command=command, outputs=(options.html, options.json))
    report.save_html(options.html)
    if options.json:
        report.save_json(options.json)
    print(render(report, is_terminal=sys.stdout.isatty()), end="")
    print(f"HTML report: {options.html}")
    return 0 if report.table.rows else 1


def _plan(options: argparse.Namespace) -> int:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # This process has not imported Keras yet.
    from lockstep.tools.plan.planner import PlanOptions, check_script, plan_script
    from lockstep.tools.plan.render import report_progress, text_of
    from lockstep.tools.scaling.api import check_writable

    if options.check:
        _refuse_options_of_plans(options)
    settings = PlanOptions.checked(
        options.hardware,
        options.strategy,
        options.batch,
        dict(options.price),
        options.bandwidth,
        hardware_file=options.hardware_file,
        limit=options.limit,
        memory=options.memory,
        jobs=options.jobs,
        is_search=options.search,
        is_check=options.check,
    )
    check_writable((options.html, options.json))
    if options.check:
        text, is_measured = check_script(options.script, options.script_arguments, settings, os.environ)
        print(text, end="")
        return 0 if is_measured else 1
    plan = plan_script(options.script, options.script_arguments, settings, os.environ, report_progress)
    if options.html:
        plan.save_html(options.html)
    if options.json:
        plan.save_json(options.json)
    print(text_of(plan, is_terminal=sys.stdout.isatty()), end="")
    return 0 if any(row.fits for row in plan.rows) else 1


def _refuse_options_of_plans(options: argparse.Namespace) -> None:
    """Reject options that a check would ignore."""
    given = {
        "--for": options.hardware,
        "--price": options.price,
        "--jobs": options.jobs,
        "--no-search": not options.search,
        "--html": options.html,
        "--json": options.json,
    }
    for name, value in given.items():
        if value:
            raise OptionError(
                f"{name}: --check measures the devices of this machine and prints lines. Fix: omit {name}, or --check."
            )


def _env(options: argparse.Namespace) -> int:
    from lockstep.tools.env import describe_environment

    print(describe_environment(os.environ))
    return 0


def _migrate(options: argparse.Namespace) -> int:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # Names are looked up in Keras.
    from lockstep.tools.migrate.translate import run_migrate

    return run_migrate(options.scripts, write=options.write, check=options.check)


def _top(options: argparse.Namespace) -> int:
    from rich.console import Console

    from lockstep.tools.top import picture, watch

    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.once or not console.is_terminal:
        console.print(picture(options.directory))
    else:
        watch(options.directory, options.interval, console)
    return 0


def _show(options: argparse.Namespace) -> int:
    from lockstep.tools.checkpoints import checkpoints_of, table

    for line in table(checkpoints_of(options.directory), options.verbose):
        print(line)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from lockstep.checkpoint.manifest import signing_key
    from lockstep.checkpoint.serialization import verify
    from lockstep.tools.checkpoints import checkpoints_of

    code, key = 0, signing_key()
    good = "good" if key is None else "good, and signed with the key"
    for path in checkpoints_of(options.directory):
        problems = verify(path, key)
        if not path.exists():  # A running job has removed it meanwhile: it keeps the newest ones only.
            continue
        code = 1 if problems else code
        state = good if not problems else "damaged" if verify(path) else "intact, but not signed with the key"
        print(f"{path.name}: {state}", *problems, sep="\n  ")
    return code


def _sign(options: argparse.Namespace) -> int:
    from lockstep.checkpoint.manifest import KEY_FILE, signing_key
    from lockstep.checkpoint.serialization import sign
    from lockstep.tools.checkpoints import checkpoints_of

    key = signing_key()
    if key is None:
        raise OptionError(f"{KEY_FILE} is not set. Fix: have it name the file of a key.")
    for path in checkpoints_of(options.directory):
        try:
            sign(path, key)
        except CheckpointError:
            if not path.exists():  # See _verify.
                continue
            raise
        print(f"{path.name}: signed")
    return 0


def _export(options: argparse.Namespace) -> int:
    from lockstep.checkpoint.export_formats import export
    from lockstep.checkpoint.manifest import signing_key
    from lockstep.tools.checkpoints import loaded_from

    loaded = loaded_from(options.directory, options.step)
    format_name = options.format or ("safetensors" if options.output.endswith(".safetensors") else "npz")
    count = export(
        loaded, options.output, format_name, only=options.only, overwrite=options.overwrite, key=signing_key()
    )
    print(f"{options.output}: {count} arrays of step {loaded.step}")
    return 0


def _import(options: argparse.Namespace) -> int:
    from lockstep.tools.checkpoints import import_checkpoint

    loaded = import_checkpoint(options.export, options.directory, options.overwrite)
    print(f"{loaded.path}: {len(loaded.arrays)} arrays of step {loaded.step}")
    return 0


_WITH_CONTAINERS = ("slurm", "kubernetes", "jobset", "trainjob", "skypilot")
_MULTI_NODE_OPTIONS = ("nnodes", "node_rank", "coordinator", "hosts")


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lockstep run``; all words after the script are arguments of the script."""
    _add_workers(parser.add_argument_group("workers"))
    lifetime = parser.add_argument_group("restarts and limits")
    text = "restart all when one fails; with --servers also a lost worker alone (default: 0)"
    _add(lifetime, "--max-restarts", type=int, default=0, metavar="K", help=text)
    _add(lifetime, "--timeout", type=float, metavar="S", help="limit for the whole run in seconds (default: none)")
    text = "seconds to exit in after SIGTERM (default: 30)"
    _add(lifetime, "--grace", type=float, default=30.0, metavar="S", help=text)
    output = parser.add_argument_group("output")
    _add(output, "--log-dir", type=Path, metavar="D", help="write the output of worker 0 to D/worker-0.log, and so on")
    _add(output, "--tee", action="store_true", help="with --log-dir: also print the output")
    text = "memory allocator, for CPUs (default: auto, the fastest available)"
    _add(parser, "--allocator", choices=ALLOCATORS, default="auto", help=text)
    text = "print a job script for a scheduler and run nothing"
    _add(parser, "--print", choices=tuple(JOB_SCRIPTS), dest="printer", help=text)
    text = "with --print: image of the containers; for slurm, Pyxis starts them"
    _add(parser, "--container-image", metavar="IMAGE", help=text)
    text = "with --print slurm and --container-image: further mounts for Pyxis"
    _add(parser, "--container-mounts", metavar="A:B,…", help=text)
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _add_workers(group: Any) -> None:
    _add(group, "--nproc-per-node", "-n", type=int, metavar="N", help="workers on each node (default: 1)")
    text = "workers of asynchronous training, with a chief and --servers; on this machine"
    _add(group, "--workers", type=int, metavar="W", help=text)
    text = "variable servers for --workers, ps in TF_CONFIG"
    _add(group, "--servers", type=int, metavar="S", help=text)
    _add(group, "--evaluator", action="store_true", help="with --servers: add a process that evaluates")
    text = "nodes, or MIN:MAX; each runs this command (default: 1, or as many as --hosts)"
    _add(group, "--nnodes", type=_nodes, metavar="M", help=text)
    _add(group, "--node-rank", type=int, metavar="R", help="rank of this node, from 0")
    _add(group, "--coordinator", metavar="HOST:PORT", help="address of worker 0 (default: a free port of this machine)")
    _add(group, "--hosts", metavar="A,B", help="all nodes in order, each HOST or HOST:PORT")
    text = "with MIN:MAX, how long to wait for more nodes once MIN have joined (default: 30)"
    _add(group, "--join-seconds", type=float, metavar="S", help=text)
    text = "with MIN:MAX, limit of the wait for MIN nodes (default: 600)"
    _add(group, "--start-seconds", type=float, metavar="S", help=text)


def _nodes(text: str) -> tuple[int | None, int]:
    """Parse ``MAX`` or ``MIN:MAX``; MIN is None if it is not given."""
    least, is_range, most = text.rpartition(":")
    try:
        return int(least) if is_range else None, int(most)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number or MIN:MAX, got {text!r}") from None


def _config_from_options(options: argparse.Namespace) -> LaunchConfig:
    """Return the launch configuration for parsed options.

    Raises:
        OptionError: the options do not fit together.
    """
    _check_servers(options)
    _check_container(options)
    _check_waits(options)
    hosts = None if options.hosts is None else tuple(host.strip() for host in options.hosts.split(","))
    least, most = options.nnodes or (None, len(hosts or ("this",)))
    names = [one.name for one in fields(LaunchConfig)]
    same_names = {name: value for name, value in vars(options).items() if name in names and value is not None}
    others = {
        "program": (options.script, *options.arguments),
        "workers": next((count for count in (options.workers, options.nproc_per_node) if count is not None), 1),
        "has_evaluator": options.evaluator,
        "nodes": most,
        "min_nodes": least,
        "hosts": hosts,
    }
    return LaunchConfig(**same_names | others)


def _check_container(options: argparse.Namespace) -> None:
    """Reject a container without a printed script that starts one."""
    if options.container_image is not None and options.printer not in _WITH_CONTAINERS:
        raise OptionError(
            f"--container-image: it is for job scripts that start containers. Fix: give --print {', '.join(_WITH_CONTAINERS)}, or omit it."
        )
    if options.container_mounts is not None and (options.container_image is None or options.printer != "slurm"):
        raise OptionError(
            "--container-mounts: it is for --print slurm with --container-image. Fix: give these, or omit it."
        )


def _check_waits(options: argparse.Namespace) -> None:
    """Reject waits for nodes where their number is fixed."""
    for option, value in {"--join-seconds": options.join_seconds, "--start-seconds": options.start_seconds}.items():
        if value is not None and (options.nnodes or (None, 1))[0] is None:
            raise OptionError(f"{option}: it is for a range of nodes. Fix: give --nnodes MIN:MAX, or omit it.")


def _check_servers(options: argparse.Namespace) -> None:
    """Reject options that exclude servers or need them."""
    given = {"--workers": options.workers, "--servers": options.servers, "--evaluator": options.evaluator or None}
    named = [option for option, value in given.items() if value is not None]
    missing = [option for option in ("--workers", "--servers") if given[option] is None]
    if not named:
        return
    if missing:
        raise OptionError(
            f"{named[0]} needs {' and '.join(missing)}. Fix: give these options, too, or only -n for synchronous training without servers."
        )
    if options.nproc_per_node is not None:
        raise OptionError(
            "--nproc-per-node: with --servers, --workers is the number of workers. Fix: omit this option."
        )
    values = {f"--{name.replace('_', '-')}": vars(options)[name] for name in _MULTI_NODE_OPTIONS}
    refused = [option for option, value in values.items() if value is not None and value != (None, 1)]
    if refused or options.printer is not None:
        raise OptionError(
            f"{(refused or ['--print'])[0]}: --servers is for one machine. Fix: on several machines, start each process of the job "
            "separately with its TF_CONFIG: the cluster with chief, worker and ps, and its own task."
        )


def _add(group: Any, option: str, *short: str, **settings: Any) -> None:
    """Add an option to a parser or a group, and its spelling with underscores, which the help does not show."""
    action = group.add_argument(*short, option, **settings)
    if "-" in option[2:]:
        spelled, kind = option[2:].replace("-", "_"), settings.get("type", str)
        hidden = argparse.SUPPRESS
        group.add_argument(f"--{spelled}", type=kind, dest=action.dest, default=hidden, help=hidden)


if __name__ == "__main__":
    sys.exit(main())
