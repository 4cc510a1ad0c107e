"""`accumlint check`: lint files and folders."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from accumlint.cli.output import COLOR, coloured, warn, width, write
from accumlint.config import FORMATS, SEVERITIES, ConfigError, Configuration, Settings, described, from_file, read_toml, shown

if TYPE_CHECKING:
    from accumlint.findings import Finding
    from accumlint.linter import Outcome
    from accumlint.selection import Thresholds
    from accumlint.source.cache import Cache


class Options(NamedTuple):
    """The command line of one run, as click read it."""

    paths: tuple[str, ...]
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    extend_select: tuple[str, ...]
    per_file_ignores: tuple[str, ...]
    exclude: tuple[str, ...]
    extend_exclude: tuple[str, ...]
    config: tuple[str, ...]
    isolated: bool
    force_exclude: bool
    stdin_filename: str | None
    output_format: str | None
    output_file: str | None
    min_severity: str
    min_confidence: str
    max_warnings: int | None
    exit_zero: bool
    statistics: bool
    add_ignore: str | None
    ignore_noqa: bool
    no_cache: bool
    cache_dir: str | None
    jobs: int | None
    show_files: bool
    show_settings: bool
    quiet: bool
    verbose: bool
    color: str


@click.command(
    "check", epilog="Exit status: 0 no error (and no more than --max-warnings warnings), 1 otherwise, 2 bad usage or unreadable paths."
)
@click.argument("paths", nargs=-1, type=click.Path(readable=False))
@click.option("--select", multiple=True, metavar="CODES", help="Rules to apply: codes, prefixes (ACC3), names, or ALL.")
@click.option("--ignore", multiple=True, metavar="CODES", help="Rules to leave out.")
@click.option("--extend-select", multiple=True, metavar="CODES", help="Rules to apply beside the selected ones.")
@click.option("--per-file-ignores", multiple=True, metavar="GLOB:CODES", help="Rules to leave out in some files.")
@click.option("--exclude", multiple=True, metavar="GLOBS", help="Paths to leave out, instead of the usual build and environment folders.")
@click.option("--extend-exclude", multiple=True, metavar="GLOBS", help="Further paths to leave out.")
@click.option("--force-exclude", is_flag=True, help="Leave out excluded paths even where they are named.")
@click.option("--config", multiple=True, metavar="FILE|SETTING", help='A configuration file, or a setting such as "max-warnings = 0".')
@click.option("--isolated", is_flag=True, help="Read no configuration file.")
@click.option("--output-format", type=click.Choice(FORMATS), help="[default: full]")
@click.option("-o", "--output-file", type=click.Path(dir_okay=False), help="Write the report to a file.")
@click.option("--min-severity", type=click.Choice(SEVERITIES), default="info", help="Report nothing below this severity.")
@click.option(
    "--min-confidence", type=click.Choice(["low", "medium", "high"]), default="high", show_default=True, help="Report nothing less sure."
)
@click.option("--max-warnings", type=click.IntRange(0), metavar="N", help="Fail if there are more warnings than this.")
@click.option("--exit-zero", is_flag=True, help="Exit with 0 whatever is found.")
@click.option("--statistics", is_flag=True, help="Count the findings of each rule instead of listing them.")
@click.option("--add-ignore", metavar="[=REASON]", help="Add a suppression comment at every finding.")
@click.option("--ignore-noqa", is_flag=True, help="Report what comments suppress, too.")
@click.option("-n", "--no-cache", is_flag=True, help="Neither read nor write the cache.")
@click.option("--cache-dir", type=click.Path(file_okay=False), help="Where to keep the cache.  [default: .accumlint_cache]")
@click.option("-j", "--jobs", type=click.IntRange(1), metavar="N", help="Processes to use.  [default: one a processor]")
@click.option("--show-files", is_flag=True, help="List the files that would be read.")
@click.option("--show-settings", is_flag=True, help="Print the settings in force.")
@click.option("--stdin-filename", metavar="FILE", help="The name of the file on standard input (`-`).")
@click.option("-q", "--quiet", is_flag=True, help="Print findings and nothing else.")
@click.option("-v", "--verbose", is_flag=True, help="Say what was done.")
@COLOR
def check(**options: Any) -> int:
    """Lint files and folders: rehearse their training loops and say what is wrong with the accumulation.

    No path means the current folder, `-` standard input.
    """
    return run_check(Options(**options))


def run_check(options: Options) -> int:
    """Runs one check; returns the exit status."""
    configuration = configured(options)
    paths = options.paths or (".",)
    base = configuration.of(_folder_of(options.stdin_filename or "." if paths == ("-",) else paths[0]))
    if options.show_settings:
        write(described(base) + "\n")
        return 0
    if options.show_files:
        return _show_files(paths, configuration, options)
    if "-" in paths:
        if len(paths) > 1:
            raise click.UsageError("`-` (standard input) cannot stand beside other paths.")
        outcome = _standard_input(configuration, options)
    else:
        outcome = _tree(paths, base, configuration, options)
    return _finish(outcome, base, configuration, options)


def configured(options: Options) -> Configuration:
    """Where settings come from on this command line: files, and the options on top of them."""
    files = [each for each in options.config if _is_file(each)]
    table: dict[str, Any] = {}
    for each in options.config:
        if each not in files:
            for key, value in read_toml(each.encode("utf-8", "surrogateescape"), f"--config {each!r}").items():
                both = isinstance(value, dict) and isinstance(table.get(key), dict)
                table[key] = table[key] | value if both else value
    if len(files) > 1:
        raise ConfigError('--config takes one file; further ones can only be settings such as "max-warnings = 0"')
    table |= _given(options)
    fixed = from_file(files[0]) if files else Settings() if options.isolated else None
    return Configuration(_overrides(table), fixed)


def _is_file(text: str) -> bool:
    if os.path.exists(text) or (text.endswith(".toml") and "=" not in text):
        return True
    if "=" not in text:
        raise ConfigError(f'--config {text!r} is neither a file nor a setting such as "max-warnings = 0"')
    return False


def _given(options: Options) -> dict[str, Any]:
    """The options that are settings, as the table of a configuration file."""
    table: dict[str, Any] = {}
    for key in ("select", "ignore", "extend-select", "exclude", "extend-exclude"):
        values: tuple[str, ...] = getattr(options, key.replace("-", "_"))
        if values:
            table[key] = [part.strip() for value in values for part in value.split(",") if part.strip()]
    if options.per_file_ignores:
        ignores: dict[str, list[str]] = {}
        for pair in (part for value in options.per_file_ignores for part in value.split(",")):
            pattern, colon, code = pair.strip().rpartition(":")
            if not colon:
                raise ConfigError(f'--per-file-ignores {pair!r}: write GLOB:CODE, as in "tests/*:ACC3"')
            ignores.setdefault(pattern, []).append(code)
        table["per-file-ignores"] = ignores
    if options.max_warnings is not None:
        table["max-warnings"] = options.max_warnings
    if options.output_format is not None:
        table["output-format"] = options.output_format
    if options.cache_dir is not None:
        table["cache-dir"] = os.path.abspath(options.cache_dir)
    return table


def _overrides(table: dict[str, Any]) -> Callable[[Settings], Settings]:
    if not table:
        return lambda settings: settings
    checked = Settings().with_table(table, "command line")  # once, so that a mistake is reported though no file is read
    del checked
    return lambda settings: settings.with_table(table, "command line")


def _folder_of(path: str) -> str:
    full = os.path.abspath(path)
    return full if os.path.isdir(full) else os.path.dirname(full)


def _show_files(paths: Sequence[str], configuration: Configuration, options: Options) -> int:
    from accumlint.source.reading.files import Candidate, find

    status = 0
    for found in find(paths, configuration, force_exclude=options.force_exclude):
        if isinstance(found, Candidate):
            write(f"{shown(found.path)}\n")
        else:
            warn(f"{shown(found.path)}: {found.reason}")
            status = 2
    return status


def _tree(paths: Sequence[str], base: Settings, configuration: Configuration, options: Options) -> Outcome:
    from accumlint.linter import lint_paths

    jobs = options.jobs or _processors()
    root = base.root if base.origin is not None else os.getcwd()

    def cache() -> Cache:
        from accumlint.source.cache import FOLDER, Cache

        return Cache(os.path.join(root, base.cache_dir or FOLDER), root)

    opened = None if options.no_cache else cache
    outcome = lint_paths(paths, configuration, cache=opened, jobs=jobs, force_exclude=options.force_exclude)
    if options.verbose:
        warn(f"{_counted(len(outcome.files), 'file')}, {outcome.cached} of them known from the cache, {jobs} processes at most")
    return outcome


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _standard_input(configuration: Configuration, options: Options) -> Outcome:
    from accumlint.linter import Outcome, lint_data
    from accumlint.source.reading.files import left_out

    name = options.stdin_filename
    path = os.path.abspath(name) if name else "-"
    settings = configuration.of(_folder_of(name or "."))
    if name and options.force_exclude and left_out(path, configuration):
        return Outcome([], [], [], [], 0)
    data = sys.stdin.buffer.read()
    examined, warnings = lint_data(path, data, settings)
    return Outcome([], [examined], [], warnings, 0, {path: data})


def _finish(outcome: Outcome, base: Settings, configuration: Configuration, options: Options) -> int:
    for unreadable in outcome.unreadable:
        warn(f"{shown(unreadable.path)}: {unreadable.reason}")
    if not options.quiet:
        for warning in outcome.warnings:
            warn(warning)
        if not outcome.files and not outcome.unreadable and "-" not in options.paths:
            warn(f"no Python files under {' '.join(options.paths) or '.'}")
    findings: list[Finding] = []
    if outcome.examined:
        from accumlint.selection import report

        reported = report(outcome.examined, configuration, _thresholds(options))
        findings = reported.findings
        if options.verbose and reported.suppressed:
            warn(f"{_counted(reported.suppressed, 'finding')} suppressed by comments")
    if options.add_ignore is not None:
        return max(_add_ignores(findings, options.add_ignore), 2 if outcome.unreadable else 0)
    if findings or outcome.files or outcome.examined:
        _print(findings, base, options, outcome.contents)
    return 2 if outcome.unreadable else _status(findings, base, options)


def _thresholds(options: Options) -> Thresholds:
    from accumlint.findings import Confidence, Severity
    from accumlint.selection import Thresholds

    return Thresholds(Severity[options.min_severity.upper()], Confidence[options.min_confidence.upper()], not options.ignore_noqa)


def _print(findings: list[Finding], base: Settings, options: Options, contents: Mapping[str, bytes]) -> None:
    name = base.output_format
    if not findings and name in {"full", "concise"} and options.output_file is None:
        if not options.quiet and not options.statistics:
            write("Nothing found.\n")
        return
    color = coloured(options.color) and options.output_file is None
    text = _statistics(findings, name) if options.statistics else _rendered(findings, name, options, contents, color=color)
    if options.output_file is None:
        write(text)
        return
    try:
        with open(options.output_file, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise click.UsageError(f"{options.output_file} cannot be written: {error.strerror}.") from None


def _rendered(findings: list[Finding], name: str, options: Options, contents: Mapping[str, bytes], *, color: bool) -> str:
    from pathlib import Path

    from accumlint.report import render
    from accumlint.rule import catalogue

    text = render(name, findings, catalogue(), _sources(contents), width=width(), color=color, root=Path.cwd())
    if options.quiet and name in {"full", "concise"}:
        return text.rstrip("\n").rpartition("\n")[0].rstrip("\n") + "\n"  # without the summary in the last line
    return text


def _sources(contents: Mapping[str, bytes]) -> Callable[[str], str]:
    """Gives reports the text of a file, from the disk where its content is not at hand."""
    from accumlint.linter import read
    from accumlint.source.reading.text import Problem, decode

    def text_of(path: str) -> str:
        try:
            text = decode(contents[path] if path in contents else read(path), path)
        except OSError:
            return ""
        return "" if isinstance(text, Problem) else text

    return text_of


def _statistics(findings: list[Finding], name: str) -> str:
    from collections import Counter

    from accumlint.config import known_rules

    counts = Counter(finding.code for finding in findings)
    rows = sorted(counts.items(), key=lambda row: (-row[1], row[0]))
    if name in {"json", "json-lines"}:
        import json

        return json.dumps([{"code": code, "name": known_rules()[code], "count": count} for code, count in rows], indent=2) + "\n"
    wide = len(str(max(counts.values(), default=0)))
    return "".join(f"{count:>{wide}}  {code}  {known_rules()[code]}\n" for code, count in rows)


def _add_ignores(findings: list[Finding], reason: str) -> int:
    from functools import partial

    from accumlint.source.editing.ignores import add_ignores
    from accumlint.source.editing.notebooks import NotEditableError, add_ignores_to_cells
    from accumlint.source.editing.rewrite import rewrite

    by_file: dict[str, dict[int, set[str]]] = {}
    for finding in findings:
        if finding.code not in {"ACC000", "ACC001"}:
            line = finding.noqa_line or finding.place.line
            by_file.setdefault(finding.place.path, {}).setdefault(line, set()).add(finding.code)
    if "-" in by_file:
        raise click.UsageError("--add-ignore needs files, not standard input.")
    added, changed, status = 0, 0, 0
    for path, codes in by_file.items():
        try:
            rewrite(path, partial(add_ignores_to_cells if path.endswith(".ipynb") else add_ignores, codes=codes, reason=reason))
            added += sum(len(each) for each in codes.values())
            changed += 1
        except OSError as error:
            warn(f"{shown(path)}: cannot be changed: {error.strerror}")
            status = 2
        except NotEditableError as error:
            warn(f"{shown(path)}: not changed: {error}")
            status = 2
    if by_file:
        write(f"Added {_counted(added, 'suppression')} in {_counted(changed, 'file')}.\n")
    else:
        write("Nothing to suppress.\n")
    return status


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _status(findings: Sequence[Finding], base: Settings, options: Options) -> int:
    if options.exit_zero:
        return 0
    from collections import Counter

    counts = Counter(str(finding.severity) for finding in findings)
    too_many = base.max_warnings is not None and counts["warning"] > base.max_warnings
    return 1 if counts["error"] or too_many else 0
