"""A program that goes on from the newest checkpoint of a directory and writes one after the other until it is killed."""

import sys

from lockstep.checkpoint.store import CheckpointStore
from tests.checkpoint.cases import filled, is_filled


def main(directory, keep):
    with CheckpointStore(directory, keep) as store:
        loaded = store.newest()
        if loaded is not None and not is_filled(loaded):
            raise SystemExit(f"a mixture at {loaded.path}")
        step = 0 if loaded is None else loaded.step
        print(step, flush=True)
        while True:
            step += 1
            store.write(step, filled(step, 100_000))
            print(step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
