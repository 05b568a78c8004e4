"""Command-line options of ``lockstep run``. Words may be joined by ``-`` or, as for torchrun, by ``_``."""

import argparse
from pathlib import Path
from typing import Any

from lockstep._errors import OptionError
from lockstep.launch.launch_config import LaunchConfig
from lockstep.launch.templates import PRINTERS
from lockstep.launch.worker_environment import ALLOCATORS

_WITH_CONTAINERS = ("slurm", "kubernetes", "jobset", "trainjob", "skypilot")
_MULTI_NODE_OPTIONS = ("nnodes", "node_rank", "coordinator", "hosts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lockstep run``; all words after the script are arguments of the script."""
    _add_workers(parser.add_argument_group("workers"))
    lifetime = parser.add_argument_group("restarts and limits")
    _add(
        lifetime,
        "--max-restarts",
        type=int,
        default=0,
        metavar="K",
        help="restart all when one fails; with --servers also a lost worker alone (0)",
    )
    _add(lifetime, "--timeout", type=float, metavar="S", help="limit for the whole run in seconds (none)")
    _add(lifetime, "--grace", type=float, default=30.0, metavar="S", help="seconds to exit in after SIGTERM (30)")
    output = parser.add_argument_group("output")
    _add(output, "--log-dir", type=Path, metavar="D", help="write the output of worker 0 to D/worker-0.log, and so on")
    _add(output, "--tee", action="store_true", help="show it, too")
    _add(
        parser,
        "--allocator",
        choices=ALLOCATORS,
        default="auto",
        help="memory allocator, for CPUs (auto: the fastest available)",
    )
    _add(
        parser,
        "--print",
        choices=tuple(PRINTERS),
        dest="printer",
        help="print a job script for a scheduler and run nothing",
    )
    text = "with --print: image of the containers; for slurm, Pyxis starts them"
    _add(parser, "--container-image", metavar="IMAGE", help=text)
    text = "with --print slurm and --container-image: further mounts for Pyxis"
    _add(parser, "--container-mounts", metavar="A:B,…", help=text)
    parser.add_argument("-m", action="store_true", dest="is_module", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _add_workers(group: Any) -> None:
    _add(group, "--nproc-per-node", "-n", type=int, metavar="N", help="workers on each node (1)")
    text = "workers of asynchronous training, with a chief and --servers; on this machine"
    _add(group, "--workers", type=int, metavar="W", help=text)
    text = "variable servers for --workers, ps in TF_CONFIG"
    _add(group, "--servers", type=int, metavar="S", help=text)
    _add(group, "--evaluator", action="store_true", help="with --servers: add a process that evaluates")
    text = "nodes, or MIN:MAX; each runs this command (1, or as many as --hosts)"
    _add(group, "--nnodes", type=_nodes, metavar="M", help=text)
    _add(group, "--node-rank", type=int, metavar="R", help="rank of this node, from 0")
    _add(group, "--coordinator", metavar="HOST:PORT", help="address of worker 0 (a free port of this machine)")
    _add(group, "--hosts", metavar="A,B", help="all nodes in order, each HOST or HOST:PORT")
    text = "with MIN:MAX, wait so long for more nodes when MIN have joined (30)"
    _add(group, "--join-seconds", type=float, default=30.0, metavar="S", help=text)
    text = "with MIN:MAX, limit of the wait for MIN nodes (600)"
    _add(group, "--start-seconds", type=float, default=600.0, metavar="S", help=text)


def _nodes(text: str) -> tuple[int | None, int]:
    """Parse ``MAX`` or ``MIN:MAX``; MIN is None if it is not given."""
    least, is_range, most = text.rpartition(":")
    try:
        return int(least) if is_range else None, int(most)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number or MIN:MAX, got {text!r}") from None


def config_from_options(options: argparse.Namespace) -> LaunchConfig:
    """Return the launch configuration for parsed options.

    Raises:
        OptionError: the options do not fit together.
    """
    _check_servers(options)
    _check_container(options)
    hosts = None if options.hosts is None else tuple(host.strip() for host in options.hosts.split(","))
    least, most = options.nnodes or (None, len(hosts or ("this",)))
    return LaunchConfig(
        program=(options.script, *options.arguments),
        is_module=options.is_module,
        workers=next((count for count in (options.workers, options.nproc_per_node) if count is not None), 1),
        servers=options.servers,
        has_evaluator=options.evaluator,
        nodes=most,
        min_nodes=least,
        node_rank=options.node_rank,
        coordinator=options.coordinator,
        hosts=hosts,
        max_restarts=options.max_restarts,
        join_seconds=options.join_seconds,
        start_seconds=options.start_seconds,
        log_dir=options.log_dir,
        tee=options.tee,
        timeout=options.timeout,
        grace=options.grace,
        allocator=options.allocator,
        container_image=options.container_image,
        container_mounts=options.container_mounts,
    )


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


def _check_servers(options: argparse.Namespace) -> None:
    """Reject options that exclude servers or need them."""
    given = {"--workers": options.workers, "--servers": options.servers, "--evaluator": options.evaluator or None}
    named = [option for option, value in given.items() if value is not None]
    missing = [option for option in ("--workers", "--servers") if given[option] is None]
    if not named:
        return
    if missing:
        raise OptionError(
            f"{named[0]}: give {' and '.join(missing)}, too; for synchronous training without servers, give -n."
        )
    if options.nproc_per_node is not None:
        raise OptionError("--nproc-per-node: with --servers, --workers is the number of workers; omit this option.")
    values = {f"--{name.replace('_', '-')}": vars(options)[name] for name in _MULTI_NODE_OPTIONS}
    refused = [option for option, value in values.items() if value is not None and value != (None, 1)]
    if refused or options.printer is not None:
        raise OptionError(
            f"{(refused or ['--print'])[0]}: --servers is for one machine. On several machines, start each process of the job "
            "separately with its TF_CONFIG: the cluster with chief, worker and ps, and its own task."
        )


def _add(group: Any, option: str, *short: str, **settings: Any) -> None:
    """Add an option to a parser or a group, and its spelling with underscores, which the help does not show."""
    action = group.add_argument(*short, option, **settings)
    if "-" in option[2:]:
        spelled, kind = option[2:].replace("-", "_"), settings.get("type", str)
        hidden = argparse.SUPPRESS
        group.add_argument(f"--{spelled}", type=kind, dest=action.dest, default=hidden, help=hidden)
