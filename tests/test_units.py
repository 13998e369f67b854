"""Sizes, rates and durations, to and from text."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import fleet, offload, tiers, unified
from penstock.units import format_bytes, format_duration, format_fields, format_rate, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (17, 17),
        ("1500000", 1_500_000),
        ("17B", 17),
        ("6GiB", 6 * 2**30),
        ("6GB", 6 * 10**9),
        ("6 gib", 6 * 2**30),
        ("  512MiB ", 512 * 2**20),
        ("1.5TiB", 3 * 2**39),
        ("0.1kB", 100),
        ("2.0KiB", 2048),
        ("3PB", 3 * 10**15),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read(text, size_bytes):
    assert parse_bytes(text) == size_bytes
    assert type(parse_bytes(text)) is int


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "6 Gi B", "6GiBs", "1e9", "1,5GB", ".5GB", "0x10", "6G", "nan", "٣GB", "²GB"]
)
def test_text_that_is_no_size_is_refused_with_the_spelling_that_works(text):
    with pytest.raises(ValueError, match=r"'6GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("size", [True, 1.5, None, b"6GiB", [6]])
def test_other_types_are_refused(size):
    with pytest.raises(TypeError, match=type(size).__name__):
        parse_bytes(size)


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="-5"):
        parse_bytes(-5)


@given(st.integers(0, 2**60))
def test_a_plain_number_reads_back(size_bytes):
    assert parse_bytes(str(size_bytes)) == parse_bytes(size_bytes) == size_bytes


@given(st.integers(0, 2**60))
def test_formatted_bytes_read_back_to_the_shown_digit(size_bytes):
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.051, abs=0)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (6 * 2**30, "6.0 GiB"),
        (-(2**20), "-1.0 MiB"),
        (2**50, "1.0 PiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(size_bytes, text):
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("bandwidth", "text"), [(2.1e9, "2.1 GB/s"), (5e8, "500.0 MB/s"), (1500, "1.5 kB/s"), (12, "12 B/s")]
)
def test_rates_are_shown_in_decimal_units(bandwidth, text):
    assert format_rate(bandwidth) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0013, "1.3 ms"),
        (15.61, "15.6 s"),
        (600, "10 min"),
        (7500, "2 h 05 min"),
        (86400 * 10, "10 days"),
        (3.2 * 365 * 86400, "3.2 years"),
    ],
)
def test_durations_are_shown_in_the_unit_that_fits(duration_s, text):
    assert format_duration(duration_s) == text


@dataclass
class Figures:
    num_steps: int = 1234
    saved_bytes: int = 2**21
    stall_s: float = 0.0125
    is_planned: bool = True
    kept_bytes: tuple | dict = ()
    peak_bytes: int | None = None
    declined: str = ""

    @property
    def hit_rate(self):
        return 2 / 3


def test_fields_are_a_table_with_units():
    figures = Figures(kept_bytes={"small": 512, "last of the cycle": 2**10})
    assert format_fields(figures, "hit_rate").splitlines() == [
        "steps                    1,234",
        "saved                    2.0 MiB",
        "stall                    12.5 ms",
        "planned                  yes",
        "kept, small              512 B",
        "kept, last of the cycle  1.0 KiB",
        "hit rate                 0.6667",
    ]


@pytest.mark.parametrize(
    ("statistics", "line"),
    [
        (offload.OffloadStatistics(num_steps=1, saved_bytes=1, parked_bytes=2**20, fetched_bytes=0, forwarded_bytes=0),
         "parked           1.0 MiB"),
        (tiers.TierStatistics(
            parked_bytes=0, fetched_bytes=2**20, forwarded_bytes=0, kept_bytes=0, bounced_bytes=0,
            written_to_disk_bytes=0, stall_s=0.0, num_live_handles=0, num_failed_writes=0, in_flight_peak_bytes=0,
        ), "fetched          1.0 MiB"),
        (unified.LoaderStatistics(sample_s=1.0, stall_s=0.5), "hidden share    0.5"),
        (fleet.DeviceStatistics(
            name="cpu", wall_s=2.0, compute_s=1.0, recompute_s=0.25, stall_s=0.0, num_units=1, peak_bytes=1,
            measured_peak_bytes=0, budget_bytes=1, parked_bytes=0, fetched_bytes=0, written_to_disk_bytes=0,
        ), "useful share     0.75"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_statistics_print_as_tables(statistics, line):
    assert line in str(statistics).splitlines()
    assert type(statistics).__name__ in repr(statistics)
