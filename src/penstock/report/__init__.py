"""What happened, to look at: one HTML page for a run, and single pictures (which need the `report` extra).

- `write_html`: a page of everything given, and Perfetto traces beside it; `save` keeps what it needs for later, as
  `REPORT_FILE` in a folder; `save_asked` keeps what a plan was asked for.
- `curves`: losses of many jobs.
- `draw_fleet`: what jobs and devices of a fleet did, from its folder, with a Perfetto trace.
- `gantt`: which job was on which device when.
- `memory_timeline`: device memory over time, with and without Penstock.
- `pareto_curve`: extra time against the peak, for plans of several budgets.
- `plan_timeline`, `plan_marks`: of a remat plan, what `memory_timeline` draws.
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
