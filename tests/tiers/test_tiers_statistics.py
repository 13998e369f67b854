"""Figures made from the counters of a waterfall."""

import pytest

from penstock.tiers import ssd_life_s


@pytest.mark.parametrize(("written", "days"), [(0, float("inf")), (6 * 10**12, 100.0)])
def test_the_life_of_an_ssd(written, days):
    life_s = ssd_life_s(capacity_bytes=10**12, written_bytes=written, duration_s=86400)
    assert life_s / 86400 == pytest.approx(days)


def test_the_life_of_an_ssd_ends_at_once_where_all_is_written_in_no_time():
    assert ssd_life_s(capacity_bytes=10**12, written_bytes=10**9, duration_s=0.0) == 0
    assert ssd_life_s(capacity_bytes=10**12, written_bytes=10**9, duration_s=float("inf")) == float("inf")
    assert ssd_life_s(capacity_bytes=10**12, written_bytes=0, duration_s=1.0) == float("inf")
