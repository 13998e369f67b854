"""The layout of charts: values that a pointer finds without a script."""

from itertools import pairwise

import pytest

from penstock.report._draw import WIDTH, draw
from penstock.report._model import BarGroup, Bars, Curves, Row, Series


def curves(*series):
    return Curves(title="", reading="", x_label="time", x_unit="s", y_label="held", y_unit="bytes", series=series)


def test_a_column_for_every_point_shows_the_values_there():
    steps = Series(name="step", points=((0.0, 0), (2.0, 1024), (4.0, 0)), style="step")
    line = Series(name="line", points=((0.0, 0), (4.0, 4096)), style="line")
    hovers = draw(curves(steps, line)).plot.hovers
    assert [hover.text for hover in hovers] == [
        "time: 0.0 ms\n0 B, step\n0 B, line",
        "time: 2.0 s\n1.0 KiB, step\n2.0 KiB, line",
        "time: 4.0 s\n0 B, step\n4.0 KiB, line",
    ]


@pytest.mark.parametrize("num_points", [1, 2, 3, 120, 121, 1500])
def test_columns_fill_the_plot_and_are_few(num_points):
    series = Series(name="", points=tuple((float(index), 1.0) for index in range(num_points)))
    hovers = draw(curves(series)).plot.hovers
    assert hovers[0].left == 0 and len(hovers) <= 120
    assert hovers[-1].left + hovers[-1].width == pytest.approx(WIDTH)
    for hover, following in pairwise(hovers):
        assert hover.left + hover.width == pytest.approx(following.left, abs=0.02)


def test_a_curve_has_no_value_outside_of_it():
    early = Series(name="early", points=((0.0, 1), (1.0, 2)), style="step")
    late = Series(name="late", points=((2.0, 3), (3.0, 4)), style="line")
    texts = [hover.text for hover in draw(curves(early, late)).plot.hovers]
    assert ["early" in text for text in texts] == [True, True, False, False]
    assert ["late" in text for text in texts] == [False, False, True, True]


@pytest.mark.parametrize(("num_bars", "num_paths"), [(600, 600), (601, 1)])
def test_bars_show_their_own_values_while_they_are_few(num_bars, num_paths):
    bars = tuple((float(index), index + 0.5, 0) for index in range(num_bars))
    chart = Bars(
        title="", reading="", x_label="", groups=(BarGroup(name="job", colour="c0"),), rows=(Row(name="", bars=bars),)
    )
    (strip,) = draw(chart).strips
    assert len(strip.paths) == num_paths
    own = "job: 500.0 ms of 5 min in this row, 3.0 s to 3.5 s"
    assert (own in [path.title for path in strip.paths]) == (num_paths > 1)
