"""Measurements made by hand, and by the very formula that predicts."""

from lockstep.collectives.cost_model import AllReduceMeasurement, Network, NetworkLink, predict_seconds
from lockstep.tools.scaling.results import CurvePoint, ScalingSetting, SettingResult

BYTES = 4_000_000
WITHIN = Network(NetworkLink(5e-5, 2e-10), NetworkLink(5e-5, 2e-10), 8)


def measured(devices, batch, **other):
    values = {
        "setting": ScalingSetting(devices, batch),
        "has_own_batches": False,
        "rows_per_epoch": 10 * batch,
        "blocks": (0.01, 0.01, 0.01),
        "bare": 0.008,
        "taking": 0.001 if devices else None,
        "all_reduce": 0.0,
        "gradient_bytes": BYTES,
        "algorithm": "auto",
        "links": (),
        "memory": 500_000_000,
        "metric": "accuracy",
        "is_higher_better": True,
        "curve": (CurvePoint(0, 0.0, 0.1), CurvePoint(5 * batch, 0.05, 0.8), CurvePoint(10 * batch, 0.1, 0.9)),
        "platform": "cpu",
        "notes": (),
    }
    return SettingResult(**{**values, **other})


def by_formula(devices, batch, compute, input_, host, network=WITHIN, algorithm="ring"):
    """What a setting would give if the formula were the truth; each part is the four coefficients of the model."""
    amounts = 1, -(-batch // devices), -(-batch // devices) * devices, devices

    def seconds(part):
        return sum(one * amount for one, amount in zip(part, amounts, strict=True))

    meeting = predict_seconds(algorithm, BYTES, devices, network)
    sizes = (4_000, 400_000, 4_000_000) if devices > 1 else ()
    return measured(
        devices,
        batch,
        blocks=(seconds(compute) + meeting + seconds(input_) + seconds(host),) * 3,
        bare=seconds(compute) + meeting,
        all_reduce=meeting,
        taking=seconds(input_),
        algorithm=algorithm,
        links=tuple(
            AllReduceMeasurement(algorithm, n, devices, predict_seconds(algorithm, n, devices, network)) for n in sizes
        ),
    )
