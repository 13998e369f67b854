"""Tables keep all their text, however narrow the terminal is."""

import pytest
from rich.console import Console
from rich.table import Table

from penstock.cli._tables import print_table

NAME = "translation learning_rate=0.001,batch=4,weight_decay=0.1"


def printed(table, width):
    console = Console(record=True, width=width)
    print_table(table, console)
    return console.export_text().splitlines()


def a_table():
    table = Table("job", "validation", "activation peak", "95% interval", "device")
    table.add_row(NAME, "", "14.1 MiB, 100%", "0.48 to 12.40", "[red]cpu #0[/]")
    table.add_row("gpt", "", "9.0 MiB, 64%", "", "cpu #1")
    return table


def cells_of(lines, index):
    return [line.split("│")[index].strip() for line in lines if line.startswith("│")]


@pytest.mark.parametrize("width", [66, 72, 80, 120])
def test_nothing_is_cut(width):
    lines = printed(a_table(), width)
    assert max(map(len, lines)) <= width
    assert "".join(cells_of(lines, 1)[:-1]).replace(" ", "") == NAME.replace(" ", "")
    assert cells_of(lines, 2)[0] == "14.1 MiB, 100%" and cells_of(lines, 3)[0] == "0.48 to 12.40"
    assert cells_of(lines, 4)[0] == "cpu #0"
    assert "…" not in "".join(lines)


def test_a_column_without_values_has_no_heading():
    assert "validation" not in "".join(printed(a_table(), 80))


def test_a_table_without_rows_keeps_its_first_column():
    assert "job" in "".join(printed(Table("job", "state"), 80))


def test_a_very_narrow_terminal_folds_everything():
    lines = printed(a_table(), 40)
    assert max(map(len, lines)) <= 40 and "…" not in "".join(lines)
