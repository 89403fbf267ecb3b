"""Answers of Slurm's programs and nvidia-smi in the form that they have on clusters, and fake programs that print them."""

from collections.abc import Mapping
from string import Template

CONFIG = "AccountingStorageEnforce = associations,limits,qos\nAccountingStorageType = accounting_storage/slurmdbd\nMinJobAge = 300 sec\n"
NO_ACCOUNTING = (
    "AccountingStorageEnforce = none\nAccountingStorageType = accounting_storage/none\nMinJobAge = 300 sec\n"
)
ASSOCIATIONS = "lab-nlp|normal,long\nlab-vision|normal,debug\n"
SINFO = """\
cpu*|40|128|515000|1-00:00:00|(null)|(null)
gpu|16|96|1031000|2-00:00:00|gpu:h100:8(S:0-1)|h100,ib
gpu|8|40|385000|2-00:00:00|gpu:v100:4|v100
"""
STATES = "cpu|up|30/10/0/40\ngpu|up|20/3/1/24\n"
NO_DATABASE = "echo 'sacct: error: Slurm accounting storage is disabled' >&2; exit 1"
CLOSED = "echo 'sacctmgr: error: Access/permission denied' >&2; exit 1"


def prints(text: str) -> str:
    """Return a script that prints ``text``."""
    return f"cat <<'END'\n{text}END"


def slurm_programs(
    config: str = CONFIG, associations: str = ASSOCIATIONS, sinfo: str = SINFO, states: str = STATES
) -> dict[str, str]:
    """Return the programs of a cluster that answers everything."""
    return {
        "scontrol": f'case "$*" in ping) echo UP;; *) {prints(config)}\n;; esac',
        "sacctmgr": prints(associations),
        "sinfo": f'case "$*" in --version) echo slurm 23.11.4;; *%F*) {prints(states)}\n;; *) {prints(sinfo)}\n;; esac',
        "sacct": "exit 0",
    }


_GPU = Template("""\
<gpu id="00000000:$number:00.0">
  <product_name>$name</product_name>
  <uuid>GPU-$uuid</uuid>
  <persistence_mode>$persistence</persistence_mode>
  <mig_mode><current_mig>$mig</current_mig></mig_mode>
  <pci><pci_gpu_link_info><link_widths>
    <max_link_width>16x</max_link_width><current_link_width>$width</current_link_width>
  </link_widths></pci_gpu_link_info></pci>
  <clocks_event_reasons>
    <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
    <clocks_event_reason_hw_slowdown>$slowdown</clocks_event_reason_hw_slowdown>
    <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
    <clocks_event_reason_sw_thermal_slowdown>Active</clocks_event_reason_sw_thermal_slowdown>
  </clocks_event_reasons>
  <compute_mode>$mode</compute_mode>
  <ecc_errors><volatile>
    <sram_correctable>7</sram_correctable><sram_uncorrectable>$errors</sram_uncorrectable>
    <dram_uncorrectable>$errors</dram_uncorrectable>
  </volatile><aggregate><dram_uncorrectable>9</dram_uncorrectable></aggregate></ecc_errors>
  <remapped_rows>
    <remapped_row_pending>$pending</remapped_row_pending><remapped_row_failure>$failure</remapped_row_failure>
  </remapped_rows>
  <fabric><state>$fabric</state><status>$status</status></fabric>
</gpu>
""")
_HEALTHY = {
    "name": "NVIDIA H100 80GB HBM3", "persistence": "Enabled", "mig": "Disabled", "width": "16x", "slowdown": "Not Active",
    "mode": "Default", "errors": "0", "pending": "No", "failure": "No", "fabric": "Completed", "status": "Success",
}  # fmt: skip
CONSUMER = {
    "name": "NVIDIA GeForce RTX 3090", "persistence": "N/A", "mig": "N/A", "errors": "N/A", "pending": "N/A",
    "failure": "N/A", "fabric": "N/A", "status": "N/A",
}  # fmt: skip


def smi_xml(*gpus: Mapping[str, str]) -> str:
    """Return the XML of ``nvidia-smi -q -x`` with a GPU for each mapping of what differs from a healthy H100."""
    rows = [
        _GPU.substitute({**_HEALTHY, **gpu}, number=f"{number:02d}", uuid=number) for number, gpu in enumerate(gpus)
    ]
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
    return f"{head}<nvidia_smi_log>\n<driver_version>580.65.06</driver_version>\n{''.join(rows)}</nvidia_smi_log>\n"


def nvidia_smi(rows: str, xml: str) -> str:
    """Return a fake nvidia-smi that answers both questions of the checks."""
    return f'case "$*" in *-x*) {prints(xml)}\n;; *) {prints(rows)}\n;; esac'
