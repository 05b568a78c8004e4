"""What the program ``laws.py`` leaves, by worker, net and name."""

import numpy as np

REPLICAS = 8


def train(run, nets, devices, **options):
    """Train nets in a job with so many devices a worker; gives for each worker its arrays."""
    folders = [run.folder / str(index) for index in range(run.workers)]
    for folder in folders:
        folder.mkdir()
    run.run(
        "laws",
        each=lambda _, index: {"folder": str(folders[index])},
        nets=nets,
        devices=devices,
        replicas=REPLICAS,
        **options,
    )
    return [arrays(folder) for folder in folders]


def arrays(folder):
    """By net the arrays that a process has left."""
    return {path.stem: dict(np.load(path)) for path in sorted(folder.glob("*.npz"))}


def assert_same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for net, values in theirs.items():
        assert ours[net].keys() == values.keys()
        for name, value in values.items():
            assert ours[net][name].tobytes() == value.tobytes(), f"{net}: {name}"
