"""Printing of tables that keep all their text at any width: no clipped name, no value cut in two, no empty column."""

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_MOST_UNBROKEN = 20
"""Cells up to this length stay on one line where there is room: values such as ``"14.1 MiB, 100%"``."""
_LEAST_NAME = 12
"""The least width of the first column, which holds names."""


def print_table(table: Table, console: Console) -> None:
    """Print a table without its empty columns. If it is too wide, headings and the names in the first column fold."""
    table.columns = [column for column in table.columns if any(map(_width, column.cells))] or table.columns[:1]
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", False
    most = [max(map(_width, [column.header, *column.cells])) for column in table.columns]
    least = [min(most[0], _LEAST_NAME), *map(_least_width, table.columns[1:])]
    left = console.width - sum(least) - 3 * len(table.columns) - 1
    # rich would shrink the widest column first, which is that of the names, and break values at their spaces
    if left >= 0:
        for column, width, most_width in zip(table.columns, least, most, strict=True):
            column.width = min(most_width, width + left)
            left -= column.width - width
    console.print(table)


def _least_width(column: Column) -> int:
    """Return the width in which the words of the heading and short cells stay whole."""
    widths = [len(word) for word in str(column.header).split()]
    for cell in column.cells:
        width = _width(cell)
        widths.append(width if width <= _MOST_UNBROKEN else max(map(_width, str(cell).split())))
    return max(widths, default=0)


def _width(cell: object) -> int:
    return Text.from_markup(cell).cell_len if isinstance(cell, str) else len(str(cell))
