"""Assertions on gradients and peaks."""

import pytest
import torch

from penstock.testing import assert_gradients_equal, assert_peak_below


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def trained(scale=1.0):
    network = model()
    (network(torch.ones(5, 3)).sum() * scale).backward()
    return network


def test_equal_gradients_pass():
    assert_gradients_equal(trained(), trained())
    assert_gradients_equal(model(), model(1))


def test_one_bit_of_difference_fails_and_is_named():
    actual = trained()
    gradient = actual[1].weight.grad
    gradient[0, 0] = torch.nextafter(gradient[0, 0], torch.tensor(torch.inf))
    with pytest.raises(AssertionError, match=r"gradients of 1\.weight differ by up to \d"):
        assert_gradients_equal(trained(), actual)


def test_a_missing_gradient_fails_and_is_named():
    actual = trained()
    actual[0].bias.grad = None
    with pytest.raises(AssertionError, match=r"gradient for 0\.bias"):
        assert_gradients_equal(trained(), actual)
    with pytest.raises(AssertionError, match=r"gradient for 0\.bias"):
        assert_gradients_equal(actual, trained())


def test_other_parameters_fail_and_are_named():
    with pytest.raises(AssertionError, match=r"1\.weight"):
        assert_gradients_equal(model(), model()[:1])


def test_other_shapes_fail():
    actual = trained()
    actual[0].weight = torch.nn.Parameter(torch.ones(4, 2))
    actual[0].weight.grad = torch.ones(4, 2)
    with pytest.raises(AssertionError, match=r"0\.weight"):
        assert_gradients_equal(trained(), actual)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype_is_another_gradient(dtype):
    """Equal numbers in other bits are not equal bit for bit."""
    expected, actual = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, dtype=dtype)
    for layer in (expected, actual):
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
    with pytest.raises(AssertionError):
        assert_gradients_equal(expected, actual)


@pytest.mark.parametrize("bits", ["nan", "signed zero"])
def test_bit_for_bit_means_bits(bits):
    """Two equal NaNs are equal; 0 and -0 are not."""
    expected, actual = trained(), trained()
    if bits == "nan":
        expected[0].bias.grad[0] = actual[0].bias.grad[0] = torch.nan
        assert_gradients_equal(expected, actual)
    else:
        expected[0].bias.grad[0], actual[0].bias.grad[0] = 0.0, -0.0
        with pytest.raises(AssertionError):
            assert_gradients_equal(expected, actual)


def test_a_peak_below_the_limit_passes(collected):
    report = assert_peak_below(lambda: torch.ones(1000), "1GiB", device="cpu")
    assert report.result.shape == (1000,)


def test_a_peak_above_the_limit_fails_with_both_figures(collected):
    with pytest.raises(AssertionError, match=r"the peak was \d+\.\d MiB, above the limit of 1\.0 MiB"):
        assert_peak_below(lambda: torch.ones(2**20), "1MiB", device="cpu")


def test_the_limit_itself_is_allowed(collected):
    peak = assert_peak_below(lambda: torch.ones(2**18), "1GiB", device="cpu").peak_bytes
    assert_peak_below(lambda: torch.ones(2**18), peak, device="cpu")
    with pytest.raises(AssertionError):
        assert_peak_below(lambda: torch.ones(2**18), peak - 1, device="cpu")
