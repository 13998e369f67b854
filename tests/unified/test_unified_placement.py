"""Where operators run follows the table of placement, as a function and as operators are placed."""

import itertools

import pytest
import torch
from unified_cases import table

from penstock import unified
from penstock.unified import Operand, _tensor

CELLS = list(
    itertools.product([None, "device", "host", "scalar"], [None, "device", "host", "scalar"], ["device", "host"])
)


@pytest.mark.parametrize("first, second, prefer", CELLS)
def test_every_cell_of_the_table_of_placement(monkeypatch, first, second, prefer):
    """The rule as a function, and as operators are placed: the ``meta`` device stands for a CUDA one."""
    monkeypatch.setattr(_tensor, "_device", lambda: torch.device("meta"))
    others = [name for name in (first, second) if name]
    kinds = {"device": Operand.DEVICE, "host": Operand.HOST, "scalar": Operand.SCALAR}
    expected = "device" if "device" in others else "host" if "host" in others else prefer
    assert unified.place([kinds[name] for name in others], [prefer]) == expected
    operands = {
        "device": torch.ones(5, device="meta"), "host": torch.ones(5), "scalar": torch.tensor(2.0), None: 2.0,
    }  # fmt: skip
    wrapped = unified.wrap(table(), prefer=prefer)
    if {"device", "host"} <= set(others):  # PyTorch's own rule for operands on two devices
        with pytest.raises(RuntimeError, match="device"):
            torch.addcmul(wrapped, operands[first], operands[second])
        return
    result = torch.addcmul(wrapped, torch.as_tensor(operands[first]), torch.as_tensor(operands[second]))
    assert result.device.type == {"device": "meta", "host": "cpu"}[expected]
    assert not unified.is_unified(result)
