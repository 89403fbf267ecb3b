"""The files that Slurm and munge read, as text."""

from collections.abc import Mapping
from pathlib import Path

HEAD = "head"
ADDRESSES: Mapping[str, str] = {HEAD: "10.77.0.1", "c1": "10.77.0.11", "c2": "10.77.0.12", "c3": "10.77.0.13"}
NODES = tuple(host for host in ADDRESSES if host != HEAD)
GPUS_PER_NODE = 2
FEATURE = "ib"
_NODE_LIST = ",".join(NODES)


def hosts() -> str:
    """`/etc/hosts` of every node: no name of the machine below shows through."""
    return "127.0.0.1 localhost\n" + "".join(f"{address} {host}\n" for host, address in ADDRESSES.items())


def slurm_conf(state: Path, *, accounting: bool) -> str:
    """`slurm.conf` of a cluster that keeps its files in ``state``.

    The partitions `gpu` and `cpu` accept only jobs with the parameters of `job_submit`, as at strict sites; `open`, the
    default, is for the jobs of the tests themselves. `whole` refuses a request of memory, and `percpu` takes it for each
    CPU alone. Three values differ from Slurm's defaults to save waiting: a
    credential expires after 30 s, the time for which Slurm holds a requeued job and in which all nodes must have begun
    a step, a silent node is down after 20 s, and the scheduler runs every second.
    """
    return f"""\
ClusterName=test
SlurmctldHost={HEAD}({ADDRESSES[HEAD]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge/socket,cred_expire=30
StateSaveLocation={state}/slurmctld
SlurmctldPidFile={state}/slurmctld.pid
SlurmctldLogFile={state}/log/slurmctld.log
SlurmdSpoolDir={state}/spool-%n
SlurmdPidFile={state}/slurmd-%n.pid
SlurmdLogFile={state}/log/slurmd-%n.log
SlurmdTimeout=20
UnkillableStepTimeout=600
# The nodes have what is written below, whatever machine carries them.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
GresTypes=gpu
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobSubmitPlugins=lua
{_accounting(state) if accounting else "AccountingStorageType=accounting_storage/none"}
NodeName={_NODE_LIST} CPUs=2 RealMemory=8000 Gres=gpu:a100:{GPUS_PER_NODE} Feature={FEATURE}
PartitionName=open Nodes={_NODE_LIST} Default=YES PriorityTier=1 GraceTime=8
PartitionName=gpu Nodes={_NODE_LIST} PriorityTier=1 GraceTime=8
PartitionName=cpu Nodes={_NODE_LIST} PriorityTier=1 GraceTime=8
PartitionName=whole Nodes={_NODE_LIST} PriorityTier=1
PartitionName=percpu Nodes={_NODE_LIST} PriorityTier=1
PartitionName=urgent Nodes={_NODE_LIST} PriorityTier=10 PreemptMode=OFF
"""


def _accounting(state: Path) -> str:
    """Lines for slurmdbd. The password is the path of munge's socket: AuthInfo does not count for this connection."""
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={ADDRESSES[HEAD]}
AccountingStoragePass={state}/munge/socket"""


def job_submit() -> str:
    """`job_submit.lua`: refuse jobs without the quality of service and the features that their partition requires.

    Slurm itself ignores a quality of service as long as there is no accounting.
    """
    return f"""\
local required = {{
  gpu = {{ qos = "long", features = "{FEATURE}" }},
  cpu = {{ qos = "short" }},
}}

function slurm_job_submit(job, partitions, user)
  for name, value in pairs(required[job.partition] or {{}}) do
    if job[name] ~= value then
      slurm.log_user("the partition " .. job.partition .. " requires " .. name .. "=" .. value)
      return slurm.ERROR
    end
  end
  if job.partition == "whole" and (job.min_mem_per_node or job.min_mem_per_cpu) then
    slurm.log_user("the partition whole gives whole nodes: the option --mem is not available")
    return slurm.ERROR
  end
  if job.partition == "percpu" and not job.min_mem_per_cpu then
    slurm.log_user("the partition percpu needs --mem-per-cpu")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, user)
  return slurm.SUCCESS
end

return slurm.SUCCESS
"""


def gres_conf(state: Path) -> str:
    """`gres.conf`: the GPUs are copies of /dev/null, since Slurm wants devices, and it hands out their numbers."""
    return f"NodeName={_NODE_LIST} Name=gpu Type=a100 File={state}/gpu[0-{GPUS_PER_NODE - 1}]\n"


def cgroup_conf() -> str:
    """`cgroup.conf`: nothing here uses cgroups, and the plugin's own search fails in containers."""
    return "CgroupPlugin=cgroup/v1\n"


def slurmdbd_conf(state: Path) -> str:
    """`slurmdbd.conf`, for a MariaDB that listens on the head's loopback."""
    return f"""\
DbdHost={HEAD}
DbdAddr={ADDRESSES[HEAD]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge/socket
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass=slurm
PidFile={state}/slurmdbd.pid
LogFile={state}/log/slurmdbd.log
"""
