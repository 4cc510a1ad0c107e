"""`python -m accumlint`."""

from __future__ import annotations

from accumlint.cli import main

if __name__ == "__main__":
    main()
