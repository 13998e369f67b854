"""Pictures of what happened (needs the `report` extra).

- `curves`: losses of many jobs.
- `draw_fleet`: what jobs and devices of a fleet did, from its folder, with a Perfetto trace.
- `gantt`: which job was on which device when.
- `memory_timeline`: device memory over time, with and without Penstock.
- `pareto_curve`: extra time against the peak, for plans of several budgets.
- `throughput_curve`: throughput against activation peak, for keep, recompute and offload.
"""

from penstock.report._fleet import draw_fleet as draw_fleet
from penstock.report._pictures import curves as curves
from penstock.report._pictures import gantt as gantt
from penstock.report._pictures import memory_timeline as memory_timeline
from penstock.report._pictures import pareto_curve as pareto_curve
from penstock.report._pictures import throughput_curve as throughput_curve
