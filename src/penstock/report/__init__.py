"""Reports of runs: one HTML page, and single pictures (which need the `report` extra).

- `write_html`: a page about everything that you pass, with Perfetto traces next to it; `save` keeps the data for a
  later page, as `REPORT_FILE` in a folder; `save_asked` keeps the budgets and method that plans were asked for.
- `curves`: losses of many jobs.
- `draw_fleet`: the jobs and devices of a fleet over time, from its folder, with a Perfetto trace.
- `gantt`: which job was on which device when.
- `memory_timeline`: device memory over time, with and without Penstock.
- `pareto_curve`: extra time against the peak, for plans of several budgets.
- `plan_timeline`, `plan_marks`: the memory and the marks of a remat plan, for `memory_timeline`.
- `throughput_curve`: throughput against activation peak, for keep, recompute and offload.
"""

from penstock.report._fleet import draw_fleet as draw_fleet
from penstock.report._html import save as save
from penstock.report._html import write_html as write_html
from penstock.report._of_remat import save_asked as save_asked
from penstock.report._pictures import curves as curves
from penstock.report._pictures import gantt as gantt
from penstock.report._pictures import memory_timeline as memory_timeline
from penstock.report._pictures import pareto_curve as pareto_curve
from penstock.report._pictures import throughput_curve as throughput_curve
from penstock.report._plans import plan_marks as plan_marks
from penstock.report._plans import plan_timeline as plan_timeline
from penstock.report._saved import REPORT_FILE as REPORT_FILE
