"""The GPUs of a node as nvidia-smi reports them, and whether the installed build of torch can use them."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from shardmake.config.accelerators import ACCELERATORS
from shardmake.config.attention import FLASH_CAPABILITY, FLASH_KERNELS, Attention
from shardmake.core.process import ask_nvidia_smi
from shardmake.core.units import GIB, plural
from shardmake.launch.gpu_status import GpuStatus, find_misfits, is_used, list_gpus, newest_build, visible_gpus
from shardmake.run.findings import Finding, MakeFinding, not_checked, ok, stops, warning
from shardmake.run.turns import takes_turns

EXCLUDE = "Exclude this node (slurm.exclude) and report it to your site."


def check_gpus(gpus: Sequence[GpuStatus] | None, visible: str | None, planned: int) -> list[Finding]:
    """Return findings about GPUs that are missing, in use or broken.

    Args:
        gpus: Every GPU of the node; None if nvidia-smi does not answer.
        visible: ``CUDA_VISIBLE_DEVICES``: indices, UUIDs or their prefixes, slices (MIG-...); None for all.
        planned: Number of ranks, one per GPU.
    """
    if gpus is None:
        return [stops("GPUs", "nvidia-smi does not answer")]
    mine = visible_gpus(gpus, visible)
    # nvidia-smi does not list slices as GPUs.
    slices = sum(name.strip().startswith("MIG-") for name in (visible or "").split(","))
    count = len(mine) + slices
    texts = [f"{count} GPUs are visible, and the plan needs {planned}"] if count < planned else []
    if slices > 1 and planned > 1:
        texts.append(f"{slices} MIG slices are visible, but CUDA shows only the first: one rank per node works")
    for gpu in mine:
        if is_used(gpu) and not takes_turns():
            texts.append(f"GPU {gpu.number} is in use: {(gpu.used or 0) / GIB:.1f} GiB")
        if gpu.compute_mode == "Prohibited":
            texts.append(f"GPU {gpu.number} is in the compute mode Prohibited, in which no program can use it")
        if gpu.uncorrected_errors:
            texts.append(f"GPU {gpu.number} has {gpu.uncorrected_errors} uncorrected memory errors")
    advice = f"Correct processes_per_node in the cluster file if it is wrong. {EXCLUDE}"
    return [stops("GPUs", text, advice) for text in texts]


def slow_gpus(gpus: Sequence[GpuStatus]) -> list[Finding]:
    """Return warnings about GPUs that work, but slowly."""
    slowed = [f"the hardware slows GPU {gpu.number} down because of heat or power" for gpu in gpus if gpu.is_slowed]
    narrow = [
        f"GPU {gpu.number} uses {gpu.lanes[0]} of its {gpu.lanes[1]} PCIe lanes"
        for gpu in gpus
        if gpu.lanes and gpu.lanes[0] < gpu.lanes[1]
    ]
    return [warning("GPUs", text) for text in slowed + narrow]


def check_build(gpus: Sequence[GpuStatus], cuda: str | None, check: str = "driver") -> list[Finding]:
    """Return a finding if a torch for ``cuda`` cannot use these GPUs; it holds for every node of this kind."""
    misfits = ["torch is a build without CUDA"] if cuda is None else find_misfits(gpus, cuda)
    if not misfits:
        return []
    usable = newest_build(gpus)
    remedy = (
        "update the driver, because no build of torch runs on it"
        if usable is None
        else f"run make install CUDA={usable}"
    )
    return [stops(check, f"{', and '.join(misfits)}: {remedy}", "Install the build of torch that this names.")]


def check_attention(gpus: Sequence[GpuStatus], attention: Attention) -> list[Finding]:
    """Return a finding if a GPU is too old for the planned attention kernel."""
    oldest = min((gpu.capability for gpu in gpus if gpu.capability is not None), default=FLASH_CAPABILITY)
    if attention not in FLASH_KERNELS or oldest >= FLASH_CAPABILITY:
        return []
    found = (
        f"a GPU has compute capability {oldest}, and attention: {attention} needs {FLASH_CAPABILITY} or newer: set "
        "accelerator in the cluster file to the GPUs of the nodes, or set attention: sdpa"
    )
    return [stops("attention", found)]


def check_gpu_memory(gpus: Sequence[GpuStatus], planned: int) -> list[Finding]:
    """Return a finding if a GPU has less memory than the plan counts on, in bytes; 0 if there is no plan for GPUs."""
    least = min((gpu.memory for gpu in gpus if gpu.memory is not None), default=planned)
    if planned <= least + _MEMORY_TOLERANCE:
        return []
    found = (
        f"the plan counts on {planned / GIB:.1f} GiB of GPU memory, and a GPU here has {least / GIB:.1f} GiB: correct "
        "accelerator and gpu_memory_gib in the cluster file, or request larger GPUs (slurm.gpu_type), and plan again"
    )
    return [stops("GPU memory", found)]


_MEMORY_TOLERANCE = GIB // 2
"""Bytes that the driver keeps for itself."""
_LINK = "pci/pci_gpu_link_info/link_widths"
_SLOWDOWNS = ("_hw_slowdown", "_hw_thermal_slowdown", "_hw_power_brake_slowdown")


class GpuState(NamedTuple):
    """One GPU; an empty text for a value that the driver does not report."""

    number: str
    """Index on the node."""
    uuid: str
    name: str
    persistence: str
    compute_mode: str
    mig: str
    memory_errors: str
    """``yes`` if ECC counted uncorrected errors since the driver started, else ``no``."""
    remap_pending: str
    remap_failure: str
    slowdown: str
    """``yes`` while the hardware slows the GPU down, else ``no``."""
    link: str
    """``narrow`` if it uses fewer PCIe lanes than it has, else ``full``."""
    fabric_state: str
    fabric_status: str


def query_states() -> list[GpuState] | None:
    """Return the state of every GPU of this node; None if nvidia-smi does not answer or prints something else."""
    answer = ask_nvidia_smi("-q", "-x")
    try:
        return parse_states(answer) if answer else None
    except ElementTree.ParseError:
        return None


def parse_states(text: str) -> list[GpuState]:
    """Parse the XML of nvidia-smi; elements that a driver does not have are empty."""
    return [_parse_gpu(number, gpu) for number, gpu in enumerate(ElementTree.fromstring(text).iter("gpu"))]


def _parse_gpu(number: int, gpu: ElementTree.Element) -> GpuState:
    def text(path: str) -> str:
        value = (gpu.findtext(path) or "").strip()
        return "" if value in ("N/A", "[N/A]", "Requested functionality has been deprecated") else value

    counters = [element for element in gpu.iterfind("ecc_errors/volatile/*") if "uncorrect" in element.tag]
    errors = [int(element.text or "") for element in counters if (element.text or "").strip().isdigit()]
    reasons = [*gpu.iterfind("clocks_event_reasons/*"), *gpu.iterfind("clocks_throttle_reasons/*")]
    slow = [(reason.text or "").strip() == "Active" for reason in reasons if reason.tag.endswith(_SLOWDOWNS)]
    lanes = text(f"{_LINK}/current_link_width")
    return GpuState(
        number=str(number),
        uuid=text("uuid"),
        name=text("product_name"),
        persistence=text("persistence_mode"),
        compute_mode=text("compute_mode"),
        mig=text("mig_mode/current_mig"),
        memory_errors=_yes(any(errors)) if errors else "",
        remap_pending=text("remapped_rows/remapped_row_pending"),
        remap_failure=text("remapped_rows/remapped_row_failure"),
        slowdown=_yes(any(slow)) if slow else "",
        link="" if not lanes else "full" if lanes == text(f"{_LINK}/max_link_width") else "narrow",
        fabric_state=text("fabric/state"),
        fabric_status=text("fabric/status"),
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def check_nvidia_smi(visible: str | None, ranks: int, cuda: str | None) -> Iterator[Finding]:
    """Report driver, number and state of the GPUs; ``visible`` is ``CUDA_VISIBLE_DEVICES``, ``cuda`` that of torch."""
    gpus = list_gpus()
    if gpus is None:
        advice = f"Check that the job got GPUs (slurm.gpu_request, slurm.gpu_type). {EXCLUDE}"
        yield stops("GPUs", "nvidia-smi does not answer", advice)
        return
    if gpus:
        fine = f"driver {gpus[0].driver}, torch for CUDA {cuda}"
        yield from check_build(gpus, cuda) or [ok("driver", fine)]
    fine = f"{ranks} GPUs, idle and without memory errors"
    yield from check_gpus(gpus, visible, ranks) or [ok("GPUs", fine)]
    states = query_states()
    if states is None:
        yield not_checked("state of the GPUs", "`nvidia-smi -q -x` does not answer, or prints no XML")
        return
    mine = {gpu.uuid for gpu in visible_gpus(gpus, visible)}
    # A slice of a GPU has a UUID of its own, which does not name the GPU.
    yield from check_states([state for state in states if state.uuid in mine] or states, ranks)


def check_states(states: Sequence[GpuState], ranks: int) -> Iterator[Finding]:
    """Report settings and defects of the GPUs, each with the numbers of the GPUs that have it."""
    yield ok("GPU model", ", ".join(sorted({state.name for state in states})) or "no GPU is listed")
    if len({state.name for state in states}) > 1:
        yield warning("GPU model", "the GPUs of this node differ", "Use nodes with equal GPUs (slurm.gpu_type).")
    slice_advice = "A process sees one slice: set gpu_memory_gib to its size."
    if ranks > 1:
        slice_advice = "A process sees one slice. Use processes_per_node: 1, or nodes without MIG."
    for check, field, bad, problem, advice, verdict in _STATES:
        values = [getattr(state, field) for state in states]
        if numbers := [state.number for state, value in zip(states, values, strict=True) if value == bad]:
            make = stops if field == "mig" and ranks > 1 else verdict
            yield make(check, f"GPU {', '.join(numbers)}: {problem}", advice or slice_advice)
        elif known := sum(map(bool, values)):
            yield ok(check, f"nothing on {plural(known, 'GPU')}")
        else:
            yield not_checked(check, "the driver does not report it")
    yield _check_fabric(states)


_PROHIBITED = f"Ask your site to set the compute mode Default. {EXCLUDE}"
_EXCLUSIVE = "The network check uses a process of its own on each GPU. Ask your site for the compute mode Default."
_PERSISTENCE = "Ask your site to run nvidia-persistenced. Starts take seconds longer without it."
_RESET = "Ask your site to reset the GPUs of this node."
_HOT = f"The hardware slows the GPU down because of heat or power. {EXCLUDE}"
_NARROW = "Offload and loading are slower. Report it to your site."
_STATES: tuple[tuple[str, str, str, str, str, MakeFinding], ...] = (
    ("compute mode", "compute_mode", "Prohibited", "no program can use it", _PROHIBITED, stops),
    ("exclusive mode", "compute_mode", "Exclusive_Process", "one process at a time", _EXCLUSIVE, warning),
    ("MIG", "mig", "Enabled", "enabled", "", warning),
    ("persistence mode", "persistence", "Disabled", "disabled: GPUs start slowly", _PERSISTENCE, warning),
    ("memory errors", "memory_errors", "yes", "uncorrected ECC errors", EXCLUDE, stops),
    ("row remapping", "remap_failure", "Yes", "failed: the GPU must be replaced", EXCLUDE, stops),
    ("pending remapping", "remap_pending", "Yes", "needs a reset of the GPU", _RESET, warning),
    ("slowdown", "slowdown", "yes", "by the hardware", _HOT, warning),
    ("PCIe width", "link", "narrow", "fewer lanes than it has", _NARROW, warning),
)
"""Check, field of `GpuState`, its value that is a problem, the problem, advice (by the ranks for MIG) and verdict."""


def _check_fabric(states: Sequence[GpuState]) -> Finding:
    """Return whether the fabric manager has set up the NVSwitches; GPUs without them report nothing."""
    reported = {(state.fabric_state, state.fabric_status) for state in states if state.fabric_state}
    if not reported:
        return not_checked("fabric manager", "this driver or GPU does not report it; the first use of CUDA shows it")
    if reported == {("Completed", "Success")}:
        return ok("fabric manager", "the NVSwitch fabric is set up")
    words = ", ".join(sorted(f"{state} {status}".strip() for state, status in reported))
    advice = f"CUDA fails with error 802 until nvidia-fabricmanager has finished. {EXCLUDE}"
    return stops("fabric manager", f"the NVSwitch fabric is not set up: {words}", advice)


# In this order: the first pattern that matches decides. The memory decides between two sizes of a GPU.
_PATTERNS = {
    r"V100.*": ("v100-16gb", "v100-32gb"),
    r"A100.*": ("a100-40gb", "a100-80gb"),
    r"H100 NVL": ("h100-nvl",),
    r"H100 PCIe": ("h100-pcie",),
    r"H100 80GB HBM3|H100 SXM\w*": ("h100",),
    r"GH200.*": ("gh200",),
    r"H200.*": ("h200",),
    r"B200": ("b200",),
    r"T4": ("t4",),
    r"A30": ("a30",),
    r"A10G?": ("a10",),
    r"A40": ("a40",),
    r"L40S": ("l40s",),
    r"L40": ("l40",),
    r"L4": ("l4",),
    r"RTX A6000": ("rtx-a6000",),
    r"RTX 6000 Ada Generation": ("rtx6000-ada",),
    r"GeForce RTX 2080 Ti": ("rtx2080ti",),
    r"GeForce RTX (3090|4090|5090)": ("rtx3090", "rtx4090", "rtx5090"),
}
MAX_DIFFERENCE = 0.25
"""Relative difference of memory above which a GPU is not the one in the catalogue, such as a MIG slice."""


def accelerator_of(name: str, memory_gib: float) -> str | None:
    """Return the catalogue's name for the GPU ``name`` with that memory; None if the catalogue does not have it."""
    bare = re.sub(r"^(NVIDIA|Tesla|Quadro)\s+", "", name.strip())
    for pattern, entries in _PATTERNS.items():
        if match := re.fullmatch(pattern, bare):
            named = [entry for entry in entries if match.groups() and entry.endswith(match[1])] or list(entries)
            nearest = min(named, key=lambda entry: abs(ACCELERATORS[entry].memory - memory_gib))
            memory = ACCELERATORS[nearest].memory
            return nearest if abs(memory - memory_gib) <= MAX_DIFFERENCE * memory else None
    return None
