"""A simulated accelerator, `"sim"`: device code is tested, and its races are found, on a machine without one.

- `load`: compiles and registers the device; from then on `torch.device("sim")` works. `why_not`: why it would not;
  `compile_device`: the slow part alone.
- `conditions`: delays, laziness, late results, poisoned memory, a limit of memory.
- `take_races`: which accesses nothing orders, whatever the timing was.
- `hold`, `release`, `num_pending`: stops a stream, lets it go on, and counts what it has still to do.

Two devices, `sim:0` and `sim:1`, with streams whose copies really run later, memory that faults when the host touches
it, a caching allocator, pinned memory and generators. Operators give the processor's results, to the bit.
It becomes this process's accelerator for good, so tests with it have a process of their own.
"""

from penstock.testing.simulated._conditions import conditions as conditions
from penstock.testing.simulated._conditions import hold as hold
from penstock.testing.simulated._conditions import num_pending as num_pending
from penstock.testing.simulated._conditions import release as release
from penstock.testing.simulated._conditions import take_races as take_races
from penstock.testing.simulated._load import compile_device as compile_device
from penstock.testing.simulated._load import load as load
from penstock.testing.simulated._load import why_not as why_not
