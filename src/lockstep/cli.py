"""The command ``lockstep``. One function a subcommand; each module is imported when its command runs."""

import argparse
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from lockstep._errors import LockstepError
from lockstep.launch.cli_args import add_arguments, job_of

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0 done, 1 something is not as it should be (numbers, a checkpoint, what the doctor looks at), could not be measured or is left to be
    translated, 2 wrong usage, or a worker's.

    Args:
        arguments: words after ``lockstep``, by default those of the process.

    Example:
        >>> from lockstep import cli
        >>> cli.main([])  # doctest: +ELLIPSIS
        usage: lockstep ...
        2
    """
    parser = _parser()
    words = sys.argv[1:] if arguments is None else list(arguments)
    behind = words.index("--") if words[:1] == ["scale"] and "--" in words else len(words)
    options, others = parser.parse_known_args(words[:behind])
    if others:
        hint = "; what is for the script itself stands last, behind --" if words[0] == "scale" else ""
        parser.error(f"unrecognized arguments: {' '.join(others)}{hint}")
    options.behind = words[behind + 1 :]
    if "run" not in options:
        parser.print_help()
        return 2
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lockstep", description="Train Keras models on many devices, exactly.")
    commands = parser.add_subparsers(title="commands")
    demo = commands.add_parser("demo", help="train on two replicas and check the numbers against one device")
    demo.add_argument("--data", choices=("digits", "mnist"), default="digits", help="digits ship with scikit-learn")
    demo.add_argument("--replicas", type=int, default=2, help="number of replicas (default: 2)")
    demo.add_argument("--devices", nargs="+", metavar="NAME", help="for example cpu:0 cpu:1 (default: all there are)")
    demo.add_argument("--epochs", type=int, help="passes over the data (default: 10, for mnist 2)")
    demo.add_argument("--output", default="demo_output", metavar="DIR", help="where curves.png goes")
    demo.set_defaults(run=_demo)
    run = commands.add_parser("run", help="run a program on several workers, here and on other machines")
    add_arguments(run)
    run.set_defaults(run=_run)
    test = commands.add_parser("test", help="see that every pair of workers adds right, and how fast")
    text = "start N workers here (default: this is one that a scheduler started)"
    test.add_argument("-n", type=int, metavar="N", help=text)
    test.set_defaults(run=_test)
    scale = commands.add_parser("scale", help="measure what more devices and other batches do for a script's model")
    _add_scale(scale)
    scale.set_defaults(run=_scale)
    environment = commands.add_parser("env", help="what to say of this machine when you report a problem")
    environment.set_defaults(run=_env)
    _add_lookers(commands)
    _add_checkpoint(commands)
    return parser


def _add_lookers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Commands that look at a script or at a run."""
    text = "look for what makes a script's training wrong or slow without an error"
    doctor = commands.add_parser("doctor", help=text)
    doctor.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    doctor.add_argument("script", help="is run up to its first fit")
    doctor.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    doctor.set_defaults(run=_doctor)
    migrate = commands.add_parser("migrate", help="turn a tf.distribute or tf.keras script into a Lockstep one")
    migrate.add_argument("scripts", nargs="+", metavar="FILE", help="Python files")
    migrate.add_argument("--write", action="store_true", help="change the files (default: show the difference)")
    text = "run the new program up to its first fit, and look at it as lockstep doctor does"
    migrate.add_argument("--check", action="store_true", help=text)
    migrate.set_defaults(run=_migrate)
    top = commands.add_parser("top", help="what the workers of a running job do")
    top.add_argument("directory", metavar="RUN_DIR", help="folder of its BackupAndRestore, or of its TensorBoard")
    text = "print it once (so it is done where the output is no terminal)"
    top.add_argument("--once", action="store_true", help=text)
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks (default: 1)")
    top.set_defaults(run=_top)


def _add_scale(scale: argparse.ArgumentParser) -> None:
    measuring = scale.add_argument_group("what is measured")
    measuring.add_argument("--devices", type=_numbers, default=(1, 2), metavar="1,2", help="numbers of devices (1,2)")
    text = "global batches (64,128,256,512)"
    measuring.add_argument("--batch", type=_numbers, default=(64, 128, 256, 512), metavar="64,128", help=text)
    measuring.add_argument("--epochs", type=int, default=1, metavar="N", help="that each setting trains (1)")
    measuring.add_argument("--rows", type=int, metavar="N", help="of the data that are used at most (all)")
    measuring.add_argument("--limit", type=float, default=600.0, metavar="S", help="seconds for each setting (600)")
    predicting = scale.add_argument_group("what is predicted: up to 1,024 devices")
    text = "between machines: GB/s, or 10GbE, 100GbE, infiniband, nvlink, pcie (100GbE)"
    predicting.add_argument("--bandwidth", type=_number_or_name, default="100GbE", metavar="B", help=text)
    text = "between machines in µs (that of the name, else 30)"
    predicting.add_argument("--latency", type=float, metavar="US", help=text)
    text = "devices in a machine (8 accelerators, or 1 CPU)"
    predicting.add_argument("--devices-per-machine", type=int, metavar="N", help=text)
    scale.add_argument("--html", default="scaling.html", metavar="FILE", help="the page (scaling.html)")
    scale.add_argument("--json", metavar="FILE", help="all figures as JSON")
    scale.add_argument(
        "script", metavar="SCRIPT", help="a Python program that calls fit; its own arguments stand last, behind --"
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _number_or_name(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _add_checkpoint(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    checkpoint = commands.add_parser("checkpoint", help="look at checkpoints, check them, take arrays out of one")
    actions = checkpoint.add_subparsers(title="actions", required=True)
    for name, run, text in (
        ("show", _show, "list the checkpoints of a directory"),
        ("verify", _verify, "read every array; the exit code is 1 if any is not as it was written"),
        ("export", _export, "write the arrays of one as a plain .npz file"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("directory", metavar="DIR", help="of all checkpoints, or of one")
        action.set_defaults(run=_catching(run))
        if name == "show":
            action.add_argument("-v", "--verbose", action="store_true", help="list the arrays, too")
        if name == "export":
            action.add_argument("output", metavar="FILE", help="a file that is there is replaced")
            action.add_argument("--step", type=int, help="which one (default: the newest good one)")
            action.add_argument("--only", default="*", metavar="PATTERN", help="names of arrays, for example 'model/*'")


def _demo(options: argparse.Namespace) -> int:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # Of this process, which is ours: nothing imported Keras yet.
    from lockstep.tools.commands.demo import run_demo

    default = 10 if options.data == "digits" else 2
    epochs = default if options.epochs is None else options.epochs
    try:
        agreed = run_demo(options.data, options.replicas, options.devices, epochs, options.output)
    except (LockstepError, FileNotFoundError) as error:
        print(f"lockstep demo: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("matplotlib", "sklearn"):
            raise
        print(f"lockstep demo: needs {error.name}; pip install 'keras-lockstep[demo]' brings it.", file=sys.stderr)
        return 2
    return 0 if agreed else 1


def _run(options: argparse.Namespace) -> int:
    from lockstep.launch.supervisor import supervise
    from lockstep.launch.templates import PRINTERS

    try:
        job = job_of(options)
        if options.printer is not None:
            print(PRINTERS[options.printer](job), end="")
            return 0
        output, messages = (io.FileIO(file.fileno(), "w", closefd=False) for file in (sys.stdout, sys.stderr))
        return supervise(job, os.environ, output, messages)
    except LockstepError as error:
        print(f"lockstep run: {error}", file=sys.stderr)
        return 2


def _test(options: argparse.Namespace) -> int:
    if options.n is not None:
        return main(["run", "-n", str(options.n), "-m", "lockstep.tools.commands.cluster_test"])
    from lockstep.tools.commands import cluster_test

    try:
        return cluster_test.main()
    except LockstepError as error:
        print(f"lockstep test: {error}", file=sys.stderr)
        return 2


def _doctor(options: argparse.Namespace) -> int:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    from lockstep.tools.commands.doctor_command import examine_script, look_at_cluster, to_standard_error

    try:
        with to_standard_error(options.json):
            network = look_at_cluster(os.environ)
            for name in network.variables:  # The script runs in this process alone, and must not wait for the others.
                os.environ.pop(name, None)
            report = examine_script(options.script, options.arguments, network)
    except LockstepError as error:
        print(f"lockstep doctor: {error}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()
        print(f"lockstep doctor: {options.script} failed before or in its first fit.", file=sys.stderr)
        return 2
    print(json.dumps(report.as_dict(), indent=2) if options.json else report)
    return 1 if report.findings else 0


def _scale(options: argparse.Namespace) -> int:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # Of this process, which is ours: nothing imported Keras yet.
    from lockstep.tools.scaling.api import scale_script
    from lockstep.tools.scaling.report import Question
    from lockstep.tools.scaling.results import Budget
    from lockstep.tools.scaling.terminal import render

    command = " ".join(["lockstep", *sys.argv[1:]])
    try:
        budget = Budget(options.epochs, options.rows, options.limit)
        question = Question(options.bandwidth, options.latency, options.devices_per_machine)
        asked = options.script, options.behind, options.devices, options.batch, budget, question
        report = scale_script(*asked, command=command, outputs=(options.html, options.json))
        print(render(report, is_terminal=sys.stdout.isatty()), end="")
        report.save_html(options.html)
        if options.json:
            report.save_json(options.json)
    except LockstepError as error:
        print(f"lockstep scale: {error}", file=sys.stderr)
        return 2
    print(f"The page: {options.html}")
    return 0 if report.table.rows else 1


def _env(options: argparse.Namespace) -> int:
    from lockstep.tools.commands.env import describe_environment

    print(describe_environment(os.environ))
    return 0


def _migrate(options: argparse.Namespace) -> int:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # Names are looked up in Keras.
    from lockstep.tools.commands.migrate_command import run_migrate

    return run_migrate(options.scripts, write=options.write, check=options.check)


def _top(options: argparse.Namespace) -> int:
    from rich.console import Console

    from lockstep.tools.commands.top import picture, watch

    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        if options.once or not console.is_terminal:
            console.print(picture(options.directory))
        else:
            watch(options.directory, options.interval, console)
    except LockstepError as error:
        print(f"lockstep top: {error}", file=sys.stderr)
        return 2
    return 0


def _catching(action: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        try:
            return action(options)
        except LockstepError as error:
            print(f"lockstep checkpoint: {error}", file=sys.stderr)
            return 2

    return run


def _show(options: argparse.Namespace) -> int:
    from lockstep.tools.commands.checkpoints import chosen, table

    for line in table(chosen(options.directory), options.verbose):
        print(line)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from lockstep.checkpoint.reader import verify
    from lockstep.tools.commands.checkpoints import chosen

    code = 0
    for path in chosen(options.directory):
        problems = verify(path)
        code = 1 if problems else code
        print(f"{path.name}: {'damaged' if problems else 'good'}", *problems, sep="\n  ")
    return code


def _export(options: argparse.Namespace) -> int:
    from lockstep.tools.commands.checkpoints import export, loaded_from

    loaded = loaded_from(options.directory, options.step)
    count = export(loaded, options.output, options.only)
    print(f"{options.output}: {count} arrays of step {loaded.step}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
