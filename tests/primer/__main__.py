"""`python -m tests.primer CHECKOUTS... [--write]`: lints the listed repositories, and says what changed against the list."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.primer.compare import Difference, checkouts, difference, lint, precision
from tests.primer.lists import FINDINGS, Row, findings, repositories, write_findings


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.primer", description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUTS", help="folders with checkouts, each called owner+name")
    parser.add_argument("--only", action="append", default=[], metavar="OWNER/NAME", help="this repository alone; may be given again")
    parser.add_argument("--write", action="store_true", help="bring the list up to date; new findings get the verdict `?`")
    options = parser.parse_args(arguments)
    known = repositories()
    there = checkouts(options.checkouts, known)
    chosen = {name: path for name, path in there.items() if not options.only or name in options.only}
    if not chosen:
        print("no listed repository is there", file=sys.stderr)
        return 2
    listed = findings()
    found: list[Row] = []
    for at, (name, path) in enumerate(chosen.items(), 1):
        print(f"\r{at}/{len(chosen)} {name:<60}", end="", file=sys.stderr, flush=True)
        found += lint(name, path)
    print("\r" + " " * 80 + "\r", end="", file=sys.stderr)
    changed = difference(found, [row for row in listed if row.repository in chosen])
    report(changed, len(chosen), len(known))
    if options.write:
        write_findings([*(row for row in listed if row.repository not in chosen), *changed.current()])
        print(f"{FINDINGS.name} is up to date")
    return 1 if changed and not options.write else 0


def report(changed: Difference, there: int, known: int) -> None:
    """Prints what changed, and how much is true."""
    for title, rows in (("new", changed.new), ("vanished", changed.vanished)):
        for row in rows:
            print(f"{title:<9} {row.repository} {row.path}:{row.line} {row.code} {row.severity} {row.verdict} {row.reading}".rstrip())
    for listed, found in changed.moved:
        print(f"moved     {listed.repository} {listed.path}:{listed.line} -> {found.line} {listed.code} {listed.verdict} {listed.reading}")
    print(f"{there} of {known} repositories: {len(changed.known)} as listed, {len(changed.new)} new, ", end="")
    print(f"{len(changed.vanished)} vanished, {len(changed.moved)} moved")
    for line in precision(changed.current()):
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
