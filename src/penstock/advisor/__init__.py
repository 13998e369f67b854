"""The advisor: which room, or combination of rooms, trains a model best under a budget, and what that costs.

- `advise` profiles a step once, tries what fits it, and returns an `Advice` with its `Option`s, the best one, and code.
- `choose` picks the best of several options; it is a pure function.

`penstock.advise` is the same function as `advise`.
"""

from penstock.advisor._advice import Advice as Advice
from penstock.advisor._advice import Option as Option
from penstock.advisor._advice import choose as choose
from penstock.advisor._run import advise as advise
