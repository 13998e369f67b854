"""The ledger of memory that the profiler cannot see."""

from penstock.probe import ledger


def test_a_ledger_records_only_inside_the_block():
    with ledger.record() as outer:
        ledger.charge(3)
        with ledger.record() as inner:
            ledger.charge(-3)
        ledger.charge(4)
    ledger.charge(-4)
    assert [size for _, size in outer] == [3, -3, 4]
    assert [size for _, size in inner] == [-3]
    assert outer[0][0] <= outer[1][0] <= outer[2][0]
