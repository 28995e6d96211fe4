"""Tables in the terminal, whole also where the terminal is narrow or the output goes to a file."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> None:
    """Print rows under headers: the first ``text_columns`` to the left, numbers to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < text_columns else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    needed = console.measure(table, options=console.options.update(width=10_000)).maximum
    Console(width=max(console.width, needed)).print(table)


def number(value: float | int | None, digits: int = 4) -> str:
    """A number of so many significant digits, an integer with thousands apart, or ``-``."""
    if value is None or value != value:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"
