"""Which room, or which mix of rooms, trains a model best under a budget, and what it costs.

- `advise`: profiles a step once, tries what fits it, and returns an `Advice`: its `Option`s, the best one, and code.
- `choose`: the best of options, a pure function.

`penstock.advise` is the same function.
"""

from penstock.advisor._advice import Advice as Advice
from penstock.advisor._advice import Option as Option
from penstock.advisor._choose import choose as choose
from penstock.advisor._run import advise as advise
