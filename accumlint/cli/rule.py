"""`accumlint rule`: the page of a rule, or of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from accumlint.cli.output import COLOR, coloured, write
from accumlint.config import ConfigError, check_selector, known_rules

if TYPE_CHECKING:
    from accumlint.rule import Rule


@click.command("rule")
@click.argument("codes", nargs=-1, metavar="CODE...")
@click.option("--all", "everything", is_flag=True, help="Every rule.")
@click.option("--output-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@COLOR
def rule(codes: tuple[str, ...], everything: bool, output_format: str, color: str) -> int:
    """Show what a rule does, why, an example, how it is measured, and when it is silent."""
    if not codes and not everything:
        raise click.UsageError("Name a rule, as in `accumlint rule ACC101`, or give --all.")
    rules = _chosen(codes, everything)
    if output_format == "json":
        import json

        pages = [_entry(each) for each in rules]
        write(json.dumps(pages if everything or len(pages) > 1 else pages[0], indent=2) + "\n")
    else:
        write("\n\n".join(_page(each, color=coloured(color)) for each in rules))
    return 0


def _chosen(codes: tuple[str, ...], everything: bool) -> list[Rule]:
    from accumlint.rule import catalogue

    rules = catalogue()
    if everything:
        return list(rules.values())
    names = {name: code for code, name in known_rules().items()}
    chosen: list[Rule] = []
    for each in codes:
        selector = check_selector(each, "accumlint rule")
        code = names.get(selector, selector)
        if code not in rules:
            those = ", ".join(known for known in rules if code == "ALL" or known.startswith(code))
            raise ConfigError(f"accumlint rule shows whole codes, not `{each}`; it begins {those}")
        chosen.append(rules[code])
    return chosen


def _entry(each: Rule) -> dict[str, Any]:
    return {
        "code": each.code,
        "name": each.name,
        "severity": str(each.severity),
        "summary": each.summary,
        "every_loop": each.every_loop,
        "measured": each.measured,
        "page": each.page,
    }


def _page(each: Rule, *, color: bool) -> str:
    heading = f"# {each.name} ({each.code})"
    scope = "every training loop" if each.every_loop else "loops that accumulate"
    lines = [heading, "", f"Severity: {each.severity}. Holds for {scope}.", "", *each.page.strip().splitlines()]
    if color:
        lines = [click.style(line, bold=True) if line.startswith("#") and not line.startswith("# expect") else line for line in lines]
    return "\n".join(lines) + "\n"
