"""The one place for differences between kinds of devices.

- `backend_of`: the backend of a device. `has_backend`: whether it has one. `is_accelerator`: whether it has one and is
  not main memory.
- `Backend`: time, memory, random states and threads of one device, under the same names for every kind.
- `Streams`, `Allocator`: a device's queues and memory counters, separate so that a fake can replace either.
  `PeakWatch`, `Peaks`: the highest values of the counters, from a starting point of your own.
- `DeviceTimeline`: when a device passed its events, on the host's clock.
- `pinned_memory`, `unpin_memory`: host memory from which the accelerator copies without the host's help.
- `pin`, `unpin`: the same for memory that exists already, at its exact size (CUDA and ROCm).
- `map_memory`: host memory of exact size. `want_huge_pages`: fewer page faults in new memory. `on_node`,
  `stay_on_node`: memory and threads near a device.
- `accelerator_type`, `accelerators`, `kinds`: the devices of this machine. `used_device`: the one that this process
  computes on.
- `random_forked`: random draws that leave the generators unchanged.

Main memory has a backend of its own. All accelerators share one, which CUDA's extends.
"""

from penstock.devices._backend import Allocator as Allocator
from penstock.devices._backend import Backend as Backend
from penstock.devices._backend import Peaks as Peaks
from penstock.devices._backend import PeakWatch as PeakWatch
from penstock.devices._backend import Stream as Stream
from penstock.devices._backend import StreamEvent as StreamEvent
from penstock.devices._backend import Streams as Streams
from penstock.devices._host_memory import map_memory as map_memory
from penstock.devices._host_memory import want_huge_pages as want_huge_pages
from penstock.devices._numa import on_node as on_node
from penstock.devices._numa import stay_on_node as stay_on_node
from penstock.devices._of import accelerator_type as accelerator_type
from penstock.devices._of import accelerators as accelerators
from penstock.devices._of import backend_of as backend_of
from penstock.devices._of import has_backend as has_backend
from penstock.devices._of import is_accelerator as is_accelerator
from penstock.devices._of import kinds as kinds
from penstock.devices._of import random_forked as random_forked
from penstock.devices._of import used_device as used_device
from penstock.devices._pin import pin as pin
from penstock.devices._pin import pinned_memory as pinned_memory
from penstock.devices._pin import unpin as unpin
from penstock.devices._pin import unpin_memory as unpin_memory
from penstock.devices._timeline import DeviceTimeline as DeviceTimeline
