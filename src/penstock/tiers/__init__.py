"""The engine under every room: it keeps bytes in tiers and moves them.

A storage leaves the device through a waterfall of tiers (host memory if the device has its own, then disk) and comes
back byte for byte:

>>> import torch
>>> from penstock import tiers
>>> waterfall = tiers.waterfall_for("cpu", tiers.Budget(disk="."))  # a directory on an SSD
>>> tensor = torch.arange(1_000_000)
>>> layout = tiers.ViewLayout.of(tensor)
>>> handle = waterfall.park(tensor.untyped_storage(), label="an example")
>>> del tensor                      # the disk has it, or will in a moment
>>> layout.rebuild(handle.get())[-1]
tensor(999999)
>>> handle.release()
>>> waterfall.close()

- `Budget`: limits, and the account of who holds what, shared by rooms that run together. `Size` and `DiskSpec` are its
  arguments; a `Footprint` is the device memory that a step takes; `Charges` are given back together; `PlaceUse` and
  `Holder` say who holds what.
- `Tier`: `HostTier` (pinned slabs) and `DiskTier` (unnamed files, direct I/O). `Extent` and `Piece` are space in a
  tier.
- `Waterfall`, `Handle`, `HandleState`: parking and fetching. `waterfall_for` serves one device, `waterfalls_for`
  several. `IN_FLIGHT_S`: for how many seconds of copying out a link may be busy. `HostWork`: a copy in may wait for it.
- `ViewLayout`: all of a tensor except its storage. `version_of`, `check_version`: check for changes in place.
- `Event`, `EventLog`, `write_trace`: copies and stalls with their times, and their export as a Perfetto trace.
- `trim_freed_memory`, `HeapKeeper`: return main memory that malloc keeps to the system, once or whenever it has grown.
- `Gate`, `gate`: keep other threads from computing while one traces a model.
- `generator_state`, `set_generator_state`, `drawing_from`, `generators_held`, `Generators`: the random state from which
  a thread draws.
- `TierStatistics`, `ssd_life_s`: counters, and how long an SSD lasts at that rate of writing.
"""

from penstock.tiers._account import Footprint as Footprint
from penstock.tiers._account import Holder as Holder
from penstock.tiers._account import PlaceUse as PlaceUse
from penstock.tiers._budget import Budget as Budget
from penstock.tiers._budget import Charges as Charges
from penstock.tiers._budget import DiskSpec as DiskSpec
from penstock.tiers._budget import Size as Size
from penstock.tiers._build import IN_FLIGHT_S as IN_FLIGHT_S
from penstock.tiers._build import MAX_IN_FLIGHT_BYTES as MAX_IN_FLIGHT_BYTES
from penstock.tiers._build import waterfall_for as waterfall_for
from penstock.tiers._build import waterfalls_for as waterfalls_for
from penstock.tiers._disk import DiskTier as DiskTier
from penstock.tiers._events import Event as Event
from penstock.tiers._events import EventLog as EventLog
from penstock.tiers._gate import Gate as Gate
from penstock.tiers._gate import gate as gate
from penstock.tiers._generators import Generators as Generators
from penstock.tiers._generators import drawing_from as drawing_from
from penstock.tiers._generators import generator_state as generator_state
from penstock.tiers._generators import generators_held as generators_held
from penstock.tiers._generators import set_generator_state as set_generator_state
from penstock.tiers._handle import Handle as Handle
from penstock.tiers._host import HostTier as HostTier
from penstock.tiers._host_work import HostWork as HostWork
from penstock.tiers._layout import ViewLayout as ViewLayout
from penstock.tiers._malloc import HeapKeeper as HeapKeeper
from penstock.tiers._malloc import trim_freed_memory as trim_freed_memory
from penstock.tiers._record import HandleState as HandleState
from penstock.tiers._statistics import TierStatistics as TierStatistics
from penstock.tiers._statistics import ssd_life_s as ssd_life_s
from penstock.tiers._tier import Extent as Extent
from penstock.tiers._tier import Piece as Piece
from penstock.tiers._tier import Tier as Tier
from penstock.tiers._trace import write_trace as write_trace
from penstock.tiers._versions import check_version as check_version
from penstock.tiers._versions import version_of as version_of
from penstock.tiers._waterfall import Waterfall as Waterfall
