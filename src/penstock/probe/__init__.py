"""Measuring the memory and time of a step, and the capabilities of this machine.

- `peak_bytes`, `record_memory`, `PeakReport`, `MemoryRecording`: the true peak of a call or a block, on CPU and CUDA.
  `can_record` says whether recordings may begin and end anywhere; `held_bytes` is what tensors take now.
- `bandwidths`, `LaneBandwidth`: the bandwidth of each link in each direction, measured and cached for a week.
  `link_rate_bytes_per_s` measures an accelerator's link in a moment.
- `machine`, `MachineReport`, `MeasuredPlace`, `Feature`: devices, tiers, bandwidths, and what works here or why
  not.
  `gpu_direct_storage` checks one directory.
- `in_rounds`, `paired_ratio`, `Ratio`: alternatives timed alternately. `provenance`: the hardware and versions of a
  measurement.
- `ledger`, `Ledger`: bytes that the record of this thread does not show, charged by the code that holds them.
"""

from penstock._deprecated import keep_old_names as _keep_old_names
from penstock.probe._bandwidth import LaneBandwidth as LaneBandwidth
from penstock.probe._bandwidth import bandwidths as bandwidths
from penstock.probe._bandwidth import link_rate_bytes_per_s as link_rate_bytes_per_s
from penstock.probe._gds import Feature as Feature
from penstock.probe._gds import gpu_direct_storage as gpu_direct_storage
from penstock.probe._ledger import Ledger as Ledger
from penstock.probe._ledger import ledger as ledger
from penstock.probe._machine import MachineReport as MachineReport
from penstock.probe._machine import MeasuredPlace as MeasuredPlace
from penstock.probe._machine import machine as machine
from penstock.probe._peak import MemoryRecording as MemoryRecording
from penstock.probe._peak import PeakReport as PeakReport
from penstock.probe._peak import can_record as can_record
from penstock.probe._peak import held_bytes as held_bytes
from penstock.probe._peak import peak_bytes as peak_bytes
from penstock.probe._peak import record_memory as record_memory
from penstock.probe._rounds import Ratio as Ratio
from penstock.probe._rounds import in_rounds as in_rounds
from penstock.probe._rounds import paired_ratio as paired_ratio
from penstock.probe._rounds import provenance as provenance

_keep_old_names(__name__, {"Place": "MeasuredPlace"})
