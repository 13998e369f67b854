"""Training of many models, each of which may exceed a device, on a few devices that are kept busy (after Hydra).

- `run`: trains `Job`s on `Device`s under a byte budget and returns `Results` (a `JobResult` per job with its
  `JobState`, `DeviceStatistics` per device). `Fleet` does the same for jobs that are added, paused, stopped and cloned
  while it runs (`JobSource`).
- `stored_result`: a job's result, read from its folder.
- `Stopper`, `Tracker`: a rule that stops a job early, and a receiver of metrics. `UnitRecord`: which unit ran when.
- `FleetState`, `JobRow`: how other processes see a fleet and send requests to it. `jobs_table` prints it.
- `FleetProblem`: jobs (`JobCost`) cut into shards (`ShardCost`), and the devices (`DeviceCost`) that they share. A job
  is a chain of `Unit`s of a `UnitKind`.
- `measure`: the costs of jobs, from pilot runs. `simulate`: a `Schedule` on a virtual clock, made of `ScheduledUnit`s
  and a `DeviceUse` per device.
- `Scheduler`: chooses the next job from its `Progress`. Give a `SchedulerName` or a function of your own.
- `lower_bound_s`, `model_parallel_s`, `pipeline_s`: a bound that no schedule beats, and what other methods reach.
- `verify`: an independent check of a schedule. `Ablation`: parts of the engine, switched off for comparison.
"""

from penstock.fleet._job import Ablation as Ablation
from penstock.fleet._job import Device as Device
from penstock.fleet._job import Job as Job
from penstock.fleet._job import JobSource as JobSource
from penstock.fleet._life import JobState as JobState
from penstock.fleet._measure import measure as measure
from penstock.fleet._problem import DeviceCost as DeviceCost
from penstock.fleet._problem import FleetProblem as FleetProblem
from penstock.fleet._problem import JobCost as JobCost
from penstock.fleet._problem import ShardCost as ShardCost
from penstock.fleet._problem import Unit as Unit
from penstock.fleet._problem import UnitKind as UnitKind
from penstock.fleet._records import Tracker as Tracker
from penstock.fleet._results import DeviceStatistics as DeviceStatistics
from penstock.fleet._results import JobResult as JobResult
from penstock.fleet._results import Results as Results
from penstock.fleet._results import stored_result as stored_result
from penstock.fleet._run import Fleet as Fleet
from penstock.fleet._run import run as run
from penstock.fleet._schedule import DeviceUse as DeviceUse
from penstock.fleet._schedule import Schedule as Schedule
from penstock.fleet._schedule import ScheduledUnit as ScheduledUnit
from penstock.fleet._schedule import lower_bound_s as lower_bound_s
from penstock.fleet._schedule import model_parallel_s as model_parallel_s
from penstock.fleet._schedule import pipeline_s as pipeline_s
from penstock.fleet._schedulers import Progress as Progress
from penstock.fleet._schedulers import Scheduler as Scheduler
from penstock.fleet._schedulers import SchedulerName as SchedulerName
from penstock.fleet._show import jobs_table as jobs_table
from penstock.fleet._simulate import simulate as simulate
from penstock.fleet._state import FleetState as FleetState
from penstock.fleet._state import JobRow as JobRow
from penstock.fleet._unit_log import UnitRecord as UnitRecord
from penstock.fleet._upkeep import Stopper as Stopper
from penstock.fleet._verify import verify as verify
