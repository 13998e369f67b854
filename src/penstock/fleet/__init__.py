"""Many models, each larger than a device, trained together on few devices that never idle (Hydra, and past it).

- `run`: trains `Job`s on `Device`s under a byte budget and returns `Results` (a `JobResult` per job with its
  `JobState`, `DeviceStatistics` per device); `Fleet` does it for jobs that come, pause, stop and are cloned
  (`JobSource`) meanwhile.
- `stored_result`: a job's result from its folder.
- `Stopper`, `Tracker`: what decides to stop a job early, and where metrics go; `UnitRecord`: what ran when.
- `FleetState`, `JobRow`: what other processes see of a fleet, and how they ask something of it; `jobs_table` shows it.
- `FleetProblem`: jobs (`JobCost`) cut into shards (`ShardCost`), and the devices (`DeviceCost`) that they share; a job
  is a chain of `Unit`s of a `UnitKind`.
- `measure`: the costs of jobs, from pilot runs. `simulate`: a `Schedule` on a virtual clock, made of `ScheduledUnit`s
  and a `DeviceUse` per device.
- `Scheduler`: which job comes next, from its `Progress`; by `SchedulerName`, or one of yours.
- `lower_bound_s`, `model_parallel_s`, `pipeline_s`: what no schedule beats, and what others reach.
- `verify`: an independent check of a schedule. `Ablation`: what the engine does, switched off for comparison.
"""

from penstock.fleet._bounds import lower_bound_s as lower_bound_s
from penstock.fleet._bounds import model_parallel_s as model_parallel_s
from penstock.fleet._bounds import pipeline_s as pipeline_s
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
from penstock.fleet._schedulers import Progress as Progress
from penstock.fleet._schedulers import Scheduler as Scheduler
from penstock.fleet._schedulers import SchedulerName as SchedulerName
from penstock.fleet._show import jobs_table as jobs_table
from penstock.fleet._simulate import simulate as simulate
from penstock.fleet._state import FleetState as FleetState
from penstock.fleet._state import JobRow as JobRow
from penstock.fleet._upkeep import Stopper as Stopper
from penstock.fleet._verify import verify as verify
from penstock.fleet._worker import UnitRecord as UnitRecord
