"""A simulated accelerator, `"sim"`, which tests device code and finds its races on a machine without an accelerator.

- `load`: compiles and registers the device; from then on `torch.device("sim")` works. `why_not`: the reason why it
  cannot be loaded here; `compile_device`: the slow part alone.
- `conditions`: delays, laziness, late results, poisoned memory, a limit of memory.
- `take_races`: the accesses that nothing orders, independent of the timing in the run.
- `hold`, `release`, `num_pending`: stop a stream, let it continue, and count its pending tasks.

There are two devices, `sim:0` and `sim:1`, with streams whose copies really run later, memory that faults when the host
touches it, a caching allocator, pinned memory and generators. Results of operators are bit-identical to the CPU's.
It stays this process's accelerator until the process ends, so tests that use it need their own process.
"""

from penstock.testing.simulated._conditions import conditions as conditions
from penstock.testing.simulated._conditions import hold as hold
from penstock.testing.simulated._conditions import num_pending as num_pending
from penstock.testing.simulated._conditions import release as release
from penstock.testing.simulated._conditions import take_races as take_races
from penstock.testing.simulated._load import compile_device as compile_device
from penstock.testing.simulated._load import load as load
from penstock.testing.simulated._load import why_not as why_not
