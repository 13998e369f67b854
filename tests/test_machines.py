"""Machines by their data sheets."""

import pytest
import torch

from penstock.machines import MACHINES, machine_named


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_each_has_sources_and_rates_in_the_right_order(machine):
    assert len(machine.sources) >= 3
    assert machine.single_flops < machine.half_flops
    assert machine.write_bytes_per_s < machine.out_bytes_per_s < machine.memory_bytes_per_s
    assert machine.read_bytes_per_s < machine.in_bytes_per_s < machine.memory_bytes_per_s
    assert all(
        slow <= fast
        for slow, fast in zip(*(machine.lane_rates(to_disk=to_disk) for to_disk in (True, False)), strict=True)
    )


def test_an_operator_takes_the_longer_of_computing_and_moving():
    machine = machine_named("h200")
    computes_s = machine.operator_s(flops=989e12, size_bytes=0, dtype=torch.bfloat16)
    assert computes_s == pytest.approx(1 / 0.6)
    assert machine.operator_s(flops=0, size_bytes=4.8e12, dtype=torch.float32) == pytest.approx(1 / 0.8)
    assert machine.operator_s(flops=989e12, size_bytes=4.8e12, dtype=torch.bfloat16) == computes_s
    assert machine.operator_s(flops=1, size_bytes=1, dtype=torch.float32) == 5e-6
    assert machine.operator_s(flops=67e12, size_bytes=0, dtype=torch.float32) == pytest.approx(1 / 0.6)


def test_a_machine_that_nobody_described():
    with pytest.raises(ValueError, match="unknown machine 'tpu'; the known machines are h200, a100"):
        machine_named("tpu")
