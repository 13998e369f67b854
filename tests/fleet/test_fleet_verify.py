"""The check of schedules."""

from dataclasses import replace

import pytest
from fleet_problems import fleet_of, make_job

from penstock import fleet
from penstock.errors import InternalError


def test_a_wrong_schedule_is_found():
    problem = fleet_of([make_job("one"), make_job("two")], 1, in_bandwidth_bytes_per_s=100.0)
    schedule = fleet.simulate(problem)
    first, *others = schedule.units
    wrong = {
        "do not each run once and in order": schedule.units[1:],
        "begins before": (first, *(replace(unit, start_s=0.0) if unit.index == 2 else unit for unit in others)),
        "takes": (replace(first, end_s=first.end_s + 5), *others),
    }
    for message, units in wrong.items():
        with pytest.raises(InternalError, match=message):
            fleet.verify(problem, replace(schedule, units=units))
