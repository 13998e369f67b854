"""Public fakes and assertions, for the tests of those who build on Penstock and for our own.

- `FaultyTier`: a tier that is full, fails, delivers short, corrupts or waits, on demand.
- `assert_gradients_equal`, `assert_peak_below`: equality to the bit, and the true peak.
- `GPT`: a small transformer in plain PyTorch, as in the demo and the benchmarks.
"""

from penstock.testing._assertions import assert_gradients_equal as assert_gradients_equal
from penstock.testing._assertions import assert_peak_below as assert_peak_below
from penstock.testing._faulty import FaultyTier as FaultyTier
from penstock.testing._gpt import GPT as GPT
