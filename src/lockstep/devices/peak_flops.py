"""Peak floating-point operations a second of accelerators, for the ``mfu`` of a running training."""

# Floating-point operations a second of one device of JAX, dense, in the fastest format that training uses with 16 bits. The first that is part of
# ``device_kind`` counts. NVIDIA: data sheets of the boards (https://www.nvidia.com/en-us/data-center/), without sparsity. TPU:
# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, halved for v2 and v3, of which JAX sees each core.
PEAKS = {
    "B200": 2.25e15,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "TPU v2": 22.5e12,
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
    "TPU v6e": 918e12,
}


def peak_of(device_kind: str) -> float | None:
    """Return the peak floating-point operations a second of a device; None if unknown, or for a part of a GPU (MIG).

    Example:
        >>> peak_of("NVIDIA A100-SXM4-80GB"), peak_of("cpu")
        (312000000000000.0, None)
    """
    words = f" {device_kind.replace('-', ' ')} "
    if " MIG " in words:
        return None
    return next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)
