"""The state of a node's GPUs as ``nvidia-smi -q -x`` reports it: settings and defects that nvidia-smi's table hides."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from xml.etree import ElementTree

from shardmake.core.nvidia_smi import ask_nvidia_smi
from shardmake.core.units import plural
from shardmake.doctor.findings import Finding, MakeFinding, each_or_ok, not_checked, ok, stops, warning
from shardmake.launch.gpus import TorchBuild, check_build, check_gpus, list_gpus, visible_gpus

_LINK = "pci/pci_gpu_link_info/link_widths"
_SLOWDOWNS = ("_hw_slowdown", "_hw_thermal_slowdown", "_hw_power_brake_slowdown")
_EXCLUDE = "Exclude this node (slurm.exclude) and report it to your site."


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


def check_nvidia_smi(visible: str | None, ranks: int, build: TorchBuild) -> Iterator[Finding]:
    """Report driver, number and state of the GPUs; ``visible`` is ``CUDA_VISIBLE_DEVICES``."""
    gpus = list_gpus()
    if gpus is None:
        advice = f"Check that the job got GPUs (slurm.gpu_request, slurm.gpu_type). {_EXCLUDE}"
        yield stops("GPUs", "nvidia-smi does not answer", advice)
        return
    if gpus:
        fine = f"driver {gpus[0].driver}, torch for CUDA {build.cuda}"
        yield from each_or_ok("driver", check_build(gpus, build), "Install the build of torch that this names.", fine)
    advice = f"Correct processes_per_node in the cluster file if it is wrong. {_EXCLUDE}"
    fine = f"{ranks} GPUs, idle and without memory errors"
    yield from each_or_ok("GPUs", check_gpus(gpus, visible, ranks), advice, fine)
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
    yield from _check_settings(states, ranks)
    yield from _check_defects(states)
    yield _check_fabric(states)


def _check_settings(states: Sequence[GpuState], ranks: int) -> Iterator[Finding]:
    modes = {state.number: state.compute_mode for state in states}
    prohibited = f"Ask your site to set the compute mode Default. {_EXCLUDE}"
    exclusive = "The network check uses a process of its own on each GPU. Ask your site for the compute mode Default."
    yield _judge("compute mode", modes, "Prohibited", "no program can use it", prohibited, stops)
    yield _judge("exclusive mode", modes, "Exclusive_Process", "one process at a time", exclusive)
    mig = {state.number: state.mig for state in states}
    if ranks > 1:
        several = "A process sees one slice. Use processes_per_node: 1, or nodes without MIG."
        yield _judge("MIG", mig, "Enabled", "enabled", several, stops)
    else:
        yield _judge("MIG", mig, "Enabled", "enabled", "A process sees one slice: set gpu_memory_gib to its size.")
    slow = "Ask your site to run nvidia-persistenced. Starts take seconds longer without it."
    persistence = {state.number: state.persistence for state in states}
    yield _judge("persistence mode", persistence, "Disabled", "disabled: GPUs start slowly", slow)


def _check_defects(states: Sequence[GpuState]) -> Iterator[Finding]:
    errors = {state.number: state.memory_errors for state in states}
    yield _judge("memory errors", errors, "yes", "uncorrected ECC errors", _EXCLUDE, stops)
    failed = {state.number: state.remap_failure for state in states}
    yield _judge("row remapping", failed, "Yes", "failed: the GPU must be replaced", _EXCLUDE, stops)
    pending = {state.number: state.remap_pending for state in states}
    reset = "Ask your site to reset the GPUs of this node."
    yield _judge("pending remapping", pending, "Yes", "needs a reset of the GPU", reset)
    hot = f"The hardware slows the GPU down because of heat or power. {_EXCLUDE}"
    slowed = {state.number: state.slowdown for state in states}
    yield _judge("slowdown", slowed, "yes", "by the hardware", hot)
    narrow = "Offload and loading are slower. Report it to your site."
    lanes = {state.number: state.link for state in states}
    yield _judge("PCIe width", lanes, "narrow", "fewer lanes than it has", narrow)


def _judge(
    check: str, values: Mapping[str, str], bad: str, problem: str, advice: str, verdict: MakeFinding = warning
) -> Finding:
    """Return a finding with the numbers of the GPUs whose value is ``bad``, or an ok finding."""
    numbers = [number for number, value in values.items() if value == bad]
    if numbers:
        return verdict(check, f"GPU {', '.join(numbers)}: {problem}", advice)
    known = sum(map(bool, values.values()))
    if not known:
        return not_checked(check, "the driver does not report it")
    return ok(check, f"nothing on {plural(known, 'GPU')}")


def _check_fabric(states: Sequence[GpuState]) -> Finding:
    """Return whether the fabric manager has set up the NVSwitches; GPUs without them report nothing."""
    reported = {(state.fabric_state, state.fabric_status) for state in states if state.fabric_state}
    if not reported:
        return not_checked("fabric manager", "this driver or GPU does not report it; the first use of CUDA shows it")
    if reported == {("Completed", "Success")}:
        return ok("fabric manager", "the NVSwitch fabric is set up")
    words = ", ".join(sorted(f"{state} {status}".strip() for state, status in reported))
    advice = f"CUDA fails with error 802 until nvidia-fabricmanager has finished. {_EXCLUDE}"
    return stops("fabric manager", f"the NVSwitch fabric is not set up: {words}", advice)
