"""Assertions on gradients and peaks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.arguments import checked
from penstock.probe import PeakReport, peak_bytes
from penstock.units import format_bytes, parse_bytes


@checked("assert_gradients_equal(plain_model, model)")
def assert_gradients_equal(expected: nn.Module, actual: nn.Module) -> None:
    """Raise ``AssertionError`` unless both modules have the same gradients, bit for bit, under the same names."""
    left, right = dict(expected.named_parameters()), dict(actual.named_parameters())
    if left.keys() != right.keys():
        raise AssertionError(f"parameters differ: {sorted(left.keys() ^ right.keys())}")
    for name, parameter in left.items():
        first, second = parameter.grad, right[name].grad
        if first is None or second is None:
            if first is not second:
                raise AssertionError(f"only one of the modules has a gradient for {name}")
        elif first.shape != second.shape or first.dtype != second.dtype:
            raise AssertionError(
                f"gradients of {name} are {first.dtype} {list(first.shape)} and {second.dtype} {list(second.shape)}"
            )
        elif not torch.equal(_bits(first), _bits(second)):
            difference = (first.double() - second.double()).abs().max().item()
            raise AssertionError(f"gradients of {name} differ by up to {difference:.3g}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


@checked("assert_peak_below(lambda: step(batch), '6GiB')")
def assert_peak_below(function: Callable[[], Any], limit: int | str, *, device: str | None = None) -> PeakReport:
    """Call ``function`` and raise ``AssertionError`` if its true peak on the device exceeds ``limit``."""
    report = peak_bytes(function, device=device)
    if report.peak_bytes > parse_bytes(limit):
        raise AssertionError(
            f"the peak was {format_bytes(report.peak_bytes)}, above the limit of {format_bytes(parse_bytes(limit))}"
        )
    return report
