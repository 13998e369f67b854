"""Public fakes and assertions, for tests of code that uses Penstock and for our own tests.

- `FaultyTier`: a tier that is full, fails, transfers too little, corrupts or waits, on demand.
- `assert_gradients_equal`, `assert_peak_below`: assert bit-identical gradients, and a limit on the true peak.
- `GPT`: a small transformer in plain PyTorch, which the demo and the benchmarks use.
"""

from penstock.testing._assertions import assert_gradients_equal as assert_gradients_equal
from penstock.testing._assertions import assert_peak_below as assert_peak_below
from penstock.testing._faulty import FaultyTier as FaultyTier
from penstock.testing._gpt import GPT as GPT
