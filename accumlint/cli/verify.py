"""`accumlint verify`: measures a short run of a training script, and proves or refutes its accumulation."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from accumlint.cli.output import COLOR, warn
from accumlint.config import FORMATS, OBJECTIVES, nearest
from accumlint.verdict import REQUIREMENTS

if TYPE_CHECKING:
    from accumlint.runtime.launch import Program
    from accumlint.runtime.settings import Settings
    from accumlint.runtime.supervise import Outcome

FAILED, UNPROVED = 2, 3
AFTER = "accumlint.after"  # where the words after `--` are kept


class Options(NamedTuple):
    """The command line of one run, as click read it; `after` are the words after `--`, None without one."""

    script: str | None
    module: str | None
    steps: int
    nproc: int | None
    timeout: float
    objective: str | None
    expect_k: int | None
    require: frozenset[str]
    tolerance: float | None
    no_exact: bool
    output_format: str
    output_file: str | None
    ranks: bool
    keep_going: bool
    graceful: bool
    max_warnings: int | None
    quiet: bool
    color: str
    after: tuple[str, ...] | None


class _Command(click.Command):
    """Keeps what follows `--` away from the options: it belongs to the script, or is a launcher's command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[AFTER] = args[:at], tuple(args[at + 1 :])
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = f"No such option: {error.option_name}. The script's own arguments go after `--`: accumlint verify train.py -- …"
            raise click.UsageError(message, ctx) from None


def _requirements(ctx: click.Context, parameter: click.Parameter, value: str) -> frozenset[str]:
    names = frozenset(part.strip() for part in value.split(",") if part.strip())
    unknown = sorted(names - set(REQUIREMENTS))
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(REQUIREMENTS)}.")
    return names


@click.command(
    "verify",
    cls=_Command,
    options_metavar="[OPTIONS]",
    epilog="Exit status: 0 confirmed, 1 violated, 2 bad usage or the script failed by itself, 3 nothing could be confirmed.",
)
@click.argument("script", required=False, metavar="SCRIPT [-- ARGUMENTS...]")
@click.argument("rest", nargs=-1, metavar="")
@click.option("-m", "--module", metavar="MODULE", help="Run a module instead of a script.")
@click.option("--steps", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Updates to observe.")
@click.option("--nproc", type=click.IntRange(1), metavar="N", help="Run N ranks on this machine, under torchrun.")
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=300.0,
    show_default=True,
    metavar="S",
    help="Seconds without progress to bear; at least 60 until training begins.",
)
@click.option(
    "--objective",
    type=click.Choice(OBJECTIVES),
    help="What weighs the same; other than token there is no reference gradient.  [default: from the configuration, or token]",
)
@click.option("--expect-k", type=click.IntRange(1), metavar="K", help="Micro-batches that every window must have.")
@click.option(
    "--require", default="", metavar="NAMES", callback=_requirements, help=f"Fail with 3 if not observed: {', '.join(REQUIREMENTS)}."
)
@click.option("--tolerance", type=click.FloatRange(0, min_open=True), metavar="X", help="Relative error of the gradient to accept.")
@click.option("--no-exact", is_flag=True, help="Compute no reference gradient: coefficients and counts only.")
@click.option("--output-format", type=click.Choice(FORMATS), default="full", show_default=True)
@click.option("-o", "--output-file", type=click.Path(dir_okay=False), help="Write the report to a file.")
@click.option("--ranks", is_flag=True, help="List every rank instead of those that differ.")
@click.option("--keep-going", is_flag=True, help="Let the script run on to its end, unobserved, after the last update.")
@click.option("--graceful", is_flag=True, help="Let `finally` blocks of the script run at the end.")
@click.option("--max-warnings", type=click.IntRange(0), metavar="N", help="Fail if there are more warnings than this.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@COLOR
@click.pass_context
def verify(ctx: click.Context, /, rest: tuple[str, ...], **options: Any) -> int:
    """Measure a short run of an unmodified training script.

    \b
        accumlint verify train.py --steps 2 -- --lr 1e-4
        accumlint verify train.py --nproc 8
        accumlint verify -- torchrun --nnodes 4 train.py

    Every rank is stopped after N optimizer updates, and what the script would have done next is not run. What it writes or
    logs before that is its own; the usual trackers are switched off. The script's standard output goes to standard error.
    """
    chosen = Options(after=ctx.meta.get(AFTER), **options)
    if rest:
        raise click.UsageError(
            f"`{rest[0]}`: the script's own arguments go after `--`: accumlint verify {chosen.script} -- {' '.join(rest)}"
        )
    return run_verify(chosen)


def run_verify(options: Options) -> int:
    """Runs one measurement; returns the exit status."""
    from accumlint.cli.progress import Progress
    from accumlint.runtime.launch import prepare
    from accumlint.runtime.supervise import Ending, supervise

    _check_output(options)
    launch = prepare(program(options), _settings(options), os.environ)
    progress = Progress(options.steps, quiet=options.quiet or not launch.shows)
    try:
        outcome = supervise(launch, progress)
    except OSError as error:
        raise click.UsageError(f"{launch.command[0]} cannot be started: {error.strerror}.") from None
    finally:
        progress.clear()
    if outcome.ending is Ending.INTERRUPTED:
        warn(f"interrupted after {outcome.seconds:.0f} s; nothing of the run is left")
        return 128 + (outcome.interrupted_by or 2)
    if not outcome.shows:
        return _quiet_status(outcome)
    from accumlint.cli.measured import shown

    return shown(outcome, options)


def _check_output(options: Options) -> None:
    """A report that cannot be written must not be found out after the run."""
    folder = os.path.dirname(os.path.abspath(options.output_file)) if options.output_file is not None else ""
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise click.UsageError(f"{options.output_file} cannot be written: no such folder, or not yours to write to.")


def program(options: Options) -> Program:
    """What is to be run. Raises a usage error with the remedy where it cannot be."""
    from accumlint.runtime.launch import Program

    if options.graceful and options.keep_going:
        raise click.UsageError("--graceful ends the script and --keep-going lets it run on: choose one.")
    if options.script and options.module:
        raise click.UsageError("A script and -m cannot stand together; arguments go after `--`.")
    if options.script and options.script.endswith(".ipynb"):
        raise click.UsageError("A notebook is not run as a script; measure its updates in a cell, with `accumlint.watch`.")
    if options.script or options.module:
        _check_target(options)
        return Program(options.script or "", options.module or "", options.after or (), options.nproc)
    if not options.after:
        what = "`--` stands without a command." if options.after is not None else "There is no script."
        raise click.UsageError(f"{what} Write `accumlint verify train.py`, or a launcher's command line after `--`.")
    if options.nproc is not None:
        raise click.UsageError("--nproc is for a script; a launcher's command line has its own option.")
    if shutil.which(options.after[0]) is None:
        raise click.UsageError(
            f"{options.after[0]}: no such command. After `--` stands a launcher's command line, such as torchrun train.py."
        )
    return Program(launcher=options.after)


def _check_target(options: Options) -> None:
    import importlib.util

    if options.script and not os.path.exists(options.script):
        hint = f" A launcher's command line goes after `--`: accumlint verify -- {options.script} …" if shutil.which(options.script) else ""
        raise click.UsageError(f"{options.script}: no such file.{hint}")
    if options.nproc is not None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise click.UsageError("--nproc starts ranks, and this is already one (RANK and WORLD_SIZE are set): leave it out.")
    if importlib.util.find_spec("torch") is None:
        raise click.UsageError(f"torch is not installed for {sys.executable}: `pip install accumlint[verify]` brings it.")


def _settings(options: Options) -> Settings:
    from accumlint.runtime.settings import Settings

    return Settings(
        token="",
        folder="",
        steps=options.steps,
        timeout=options.timeout,
        reference="off" if options.no_exact else "auto",
        graceful=options.graceful,
        keep_going=options.keep_going,
        objective=options.objective or nearest(os.getcwd()).objective,
    )


def _quiet_status(outcome: Outcome) -> int:
    """The exit status of a controller whose ranks report elsewhere."""
    from accumlint.runtime.supervise import Ending

    return {Ending.UPDATES: 0, Ending.ERROR: FAILED}.get(outcome.ending, UNPROVED)
