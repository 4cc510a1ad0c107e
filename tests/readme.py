"""Writes the generated parts of README.md: `python -m tests.readme`; with `--check` only says whether they are up to date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from accumlint.rule import Rule, catalogue
from accumlint.source.vocabulary.base import described
from accumlint.source.vocabulary.registry import frameworks

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
EXAMPLE = "fixtures/acc101_backward_only_no_sync"


def table(rules: dict[str, Rule]) -> str:
    """The catalogue as a Markdown table."""
    lines = ["| code | name | severity | what it finds |", "|---|---|---|---|"]
    for rule in rules.values():
        dagger = " †" if rule.every_loop else ""
        summary = rule.summary.rstrip(".").replace("|", "\\|")
        lines.append(f"| {rule.code}{dagger} | {rule.name} | {rule.severity} | {summary} |")
    return "\n".join(lines)


def known_frameworks() -> str:
    """The frameworks whose calls are known, in the words of their vocabularies."""
    lines = ["| framework | what is known of it |", "|---|---|"]
    for name, told in sorted((described(module) for module in frameworks()), key=lambda each: each[0].lower()):
        lines.append(f"| {name} | {told[:1].upper()}{told[1:].rstrip('.')} |".replace("`|`", "`\\|`"))
    return "\n".join(lines)


def example() -> str:
    """What the tool says of one of the shipped fixtures, as a reader would type it."""
    path = sorted(ROOT.glob(f"{EXAMPLE}/bad_closure.py"))[0].relative_to(ROOT).as_posix()
    command = ["accumlint", path]
    run = [sys.executable, "-m", *command, "--isolated", "--no-cache"]
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONUTF8": "1"}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode != 1:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return f"```text\n$ {' '.join(command)}\n{done.stdout.rstrip()}\n```"


def written(text: str) -> str:
    """The README with its generated parts replaced."""
    for name, content in (("example", example()), ("rules", table(catalogue())), ("frameworks", known_frameworks())):
        pattern = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"README.md needs one part named {name!r}")
        text = pattern.sub("\\1" + content.replace("\\", "\\\\") + "\n\\2", text)
    return text


def main() -> None:
    text = README.read_text(encoding="utf-8")
    new = written(text)
    if "--check" in sys.argv[1:]:
        raise SystemExit("README.md is out of date: run `python -m tests.readme`" if new != text else 0)
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
