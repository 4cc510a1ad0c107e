"""`accumlint` and `python -m accumlint`: an interrupt while the program is still being imported ends it like any other."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """The command line of this process."""
    try:
        from accumlint.cli import main as command
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    command()


if __name__ == "__main__":
    main()
