"""The catalogue of accelerators: memory, speed and links of each GPU model."""

from dataclasses import dataclass

from shardmake.core.errors import ConfigError, nearest

TERA = 10**12


@dataclass(frozen=True)
class Accelerator:
    """One GPU model, or the CPU.

    ``memory`` is what the driver reports as total (GiB; less than the nominal size if ECC takes a part), ``bf16``,
    ``fp16`` and ``fp32`` are dense peak TFLOP/s from the vendors' data sheets (0: not supported in hardware),
    ``bandwidth`` is device memory in GB/s, ``link`` is GPU to GPU within a node in GB/s each way, ``host_link`` is
    GPU to host.
    """

    name: str
    memory: float
    bf16: float
    fp16: float
    fp32: float
    bandwidth: float
    link: float
    host_link: float
    capability: float

    @property
    def is_cpu(self) -> bool:
        """True if ranks run on the CPU."""
        return self.name == "cpu"

    @property
    def has_tf32(self) -> bool:
        """True from Ampere on."""
        return self.capability >= 8.0

    def flops(self, precision: str, *, tf32: bool = False) -> float:
        """Return the dense peak in FLOP/s; with ``tf32``, fp32 products take half the rate of bf16."""
        fp32 = self.bf16 / 2 if tf32 else self.fp32
        return {"bf16": self.bf16, "fp16": self.fp16, "fp32": fp32}[precision] * TERA


# GPUs without NVLink have the rate of their PCIe link. Those of GeForce copy through the host: a ring of four RTX 4090
# reaches 12.7 GB/s (pull request 22 of tinygrad/open-gpu-kernel-modules), a share of 0.7 of 18.
_ROWS = [
    # name            GiB    bf16   fp16   fp32  GB/s  link  host  capability
    ("v100-16gb", 15.8, 0, 125, 15.7, 900, 150, 12, 7.0),
    ("v100-32gb", 31.7, 0, 125, 15.7, 900, 150, 12, 7.0),
    ("t4", 14.6, 0, 65, 8.1, 320, 12, 12, 7.5),
    ("rtx2080ti", 10.7, 0, 54, 13.4, 616, 12, 12, 7.5),
    ("a100-40gb", 39.4, 312, 312, 19.5, 1555, 300, 25, 8.0),
    ("a100-80gb", 79.1, 312, 312, 19.5, 2039, 300, 25, 8.0),
    ("a30", 23.5, 165, 165, 10.3, 933, 100, 25, 8.0),
    ("a10", 22.0, 125, 125, 31.2, 600, 25, 25, 8.6),
    ("a40", 44.5, 150, 150, 37.4, 696, 56, 25, 8.6),
    ("rtx-a6000", 47.5, 155, 155, 38.7, 768, 56, 25, 8.6),
    ("rtx3090", 23.6, 71, 71, 35.6, 936, 25, 25, 8.6),
    ("rtx4090", 23.5, 165, 165, 82.6, 1008, 18, 25, 8.9),
    ("rtx6000-ada", 47.4, 364, 364, 91.1, 960, 25, 25, 8.9),
    ("l4", 22.0, 121, 121, 30.3, 300, 25, 25, 8.9),
    ("l40", 44.4, 181, 181, 90.5, 864, 25, 25, 8.9),
    ("l40s", 44.4, 362, 362, 91.6, 864, 25, 25, 8.9),
    ("h100", 79.1, 989, 989, 67, 3350, 450, 50, 9.0),
    ("h100-pcie", 79.1, 756, 756, 51, 2000, 50, 50, 9.0),
    ("h100-nvl", 93.1, 835, 835, 60, 3900, 300, 50, 9.0),
    ("gh200", 94.5, 989, 989, 67, 4000, 450, 400, 9.0),
    ("h200", 139.8, 989, 989, 67, 4800, 450, 50, 9.0),
    ("b200", 178.3, 2250, 2250, 80, 8000, 900, 50, 10.0),
    ("rtx5090", 31.4, 209, 209, 104.8, 1792, 50, 50, 12.0),
    # A core with two units for AVX-512 does about 200 GFLOP/s in fp32; a rank has the sum of its cores. The link is
    # what gloo reaches between the ranks of a node (benchmarks/results/step_time_cpu.txt).
    ("cpu", 0, 0.2, 0.2, 0.2, 20, 0.18, 5, 0),
]
ACCELERATORS: dict[str, Accelerator] = {str(row[0]): Accelerator(*row) for row in _ROWS}


def find_accelerator(name: str) -> Accelerator:
    """Return the catalogue's entry for ``name``; capitals do not matter."""
    entry = ACCELERATORS.get(name.lower())
    alike = [known for known in ACCELERATORS if known.startswith(name.lower())] if name else []
    if entry is None and name.lower().startswith("mi"):
        raise ConfigError(
            f"{name!r} is not supported. Nothing of Shardmake ran on AMD GPUs, and its checks of nodes ask nvidia-smi. "
            "Use NVIDIA GPUs."
        )
    if entry is None:
        # Such as both sizes of the A100 for ``a100``.
        meant = f" Did you mean {' or '.join(map(repr, alike))}?" if alike else nearest(name.lower(), ACCELERATORS)
        raise ConfigError(
            f"{name!r} is not in the catalogue of accelerators.{meant} Known: "
            f"{', '.join(ACCELERATORS)}. For another GPU, name the most similar one and set gpu_memory_gib."
        )
    return entry
