"""Command line of ``./scripts/mutants``."""

import argparse
import sys

from tests.mutants import draw, reach, report, run


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="./scripts/mutants", description="Mutation tests: check that the tests detect faults."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "reach", help="run the tests once and keep which of them reach which line; arguments go to pytest"
    )
    commands.add_parser("draw", help="draw the mutants by rule anew")
    commands.add_parser("report", help="write tests/mutants/README.md")
    runs = commands.add_parser("run", help="run mutants that have no result yet")
    runs.add_argument("ids", nargs="*", metavar="ID", help="only these, known or not")
    runs.add_argument("--jobs", type=int, default=2)
    runs.add_argument("--seconds", type=float, default=900.0, help="limit of one mutant")
    runs.add_argument("--again", action="store_true", help="also those with a result")
    runs.add_argument("--wide", action="store_true", help="with all tests that reach the file, and not only the line")
    runs.add_argument(
        "--keep-caught", action="store_true", help="those that were caught need not be caught again by changed tests"
    )
    options, rest = parser.parse_known_args()
    if options.command == "reach":
        return reach.measure(rest)
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    if options.command == "draw":
        return draw.redraw() or 0
    if options.command == "report":
        return min(1, report.write())
    left = run.run(options.ids, options.jobs, options.seconds, options.again, options.wide, options.keep_caught)
    print(f"{left} were not caught.")
    return min(1, left)


if __name__ == "__main__":
    sys.exit(main())
