"""Where and how a command writes: colour, width, and nothing that the terminal's encoding cannot show."""

from __future__ import annotations

import os
import sys

import click

COLOR = click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Colour the output. `auto` follows the terminal and NO_COLOR.",
)
PIPED_WIDTH = 100


def coloured(choice: str) -> bool:
    """Whether to colour standard output."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def width() -> int:
    """Columns to draw in."""
    import shutil

    return max(shutil.get_terminal_size((PIPED_WIDTH, 24)).columns, 40)


def write(text: str) -> None:
    """Writes to standard output; what its encoding lacks is spelled in ASCII."""
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        from accumlint.report.terminal import encodable

        sys.stdout.write(encodable(text, sys.stdout.encoding or "ascii"))
    sys.stdout.flush()


def warn(text: str) -> None:
    """One line on standard error, without anything that could act on the terminal."""
    printable = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    click.echo(f"accumlint: {printable.encode('utf-8', 'backslashreplace').decode()}", err=True)
