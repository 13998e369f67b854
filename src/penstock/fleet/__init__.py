"""Many models, each larger than the device, trained together on few devices (Hydra). So far: their schedule.

- `FleetProblem`: jobs (`JobCost`) cut into shards (`ShardCost`), and the devices (`DeviceCost`) that they share; a job
  is a chain of `Unit`s of a `UnitKind`.
- `simulate`: a `Schedule` on a virtual clock, made of `ScheduledUnit`s and a `DeviceUse` per device.
- `Scheduler`: which job comes next, from its `Progress`; by `SchedulerName`, or one of yours.
- `lower_bound_s`, `model_parallel_s`, `pipeline_s`: what no schedule beats, and what others reach.
- `verify`: an independent check of a schedule.
"""

from penstock.fleet._bounds import lower_bound_s as lower_bound_s
from penstock.fleet._bounds import model_parallel_s as model_parallel_s
from penstock.fleet._bounds import pipeline_s as pipeline_s
from penstock.fleet._problem import DeviceCost as DeviceCost
from penstock.fleet._problem import FleetProblem as FleetProblem
from penstock.fleet._problem import JobCost as JobCost
from penstock.fleet._problem import ShardCost as ShardCost
from penstock.fleet._problem import Unit as Unit
from penstock.fleet._problem import UnitKind as UnitKind
from penstock.fleet._schedule import DeviceUse as DeviceUse
from penstock.fleet._schedule import Schedule as Schedule
from penstock.fleet._schedule import ScheduledUnit as ScheduledUnit
from penstock.fleet._schedulers import Progress as Progress
from penstock.fleet._schedulers import Scheduler as Scheduler
from penstock.fleet._schedulers import SchedulerName as SchedulerName
from penstock.fleet._simulate import simulate as simulate
from penstock.fleet._verify import verify as verify
