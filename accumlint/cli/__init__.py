"""The command line: `accumlint [check] PATHS…`, one module a command, imported only when it is called."""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Sequence

import click

from accumlint import __version__
from accumlint.config import ConfigError

COMMANDS = {
    "check": "Lint files and folders (the default command).",
    "rule": "Show the page of a rule, or of all.",
    "show": "Draw the rehearsed windows of every training loop of a file.",
    "verify": "Measure a short run of a training script.",
    "doctor": "Check what this machine's torch lets verify observe.",
}
USAGE = 2
INTERRUPTED = 130


class Commands(click.Group):
    """Looks a command up in the module of its name, where it stands under its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        import importlib

        command: click.Command = getattr(importlib.import_module(f"accumlint.cli.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    options_metavar="",
    subcommand_metavar="[check] [OPTIONS] [PATHS]... | COMMAND",
)
@click.version_option(__version__, "-V", "--version", message="accumlint %(version)s")
def group() -> None:
    """Finds mistakes in PyTorch gradient accumulation by rehearsing the training loop.

    `accumlint src/` lints a tree; `accumlint check --help` lists the options.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its status. Never a traceback for what a user can cause."""
    gc.set_threshold(100_000, 20, 20)  # a short run makes little garbage, and the collector walks every tree again and again
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """The exit status of one command line."""
    try:
        status = group.main(prepared(arguments), prog_name="accumlint", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except click.UsageError as error:
        _complain(error.format_message(), _remedy(error))
    except click.ClickException as error:
        _complain(error.format_message())
    except ConfigError as error:
        _complain(str(error))
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has enough; nothing must complain when the interpreter flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            _complain("the output cannot be written: no space is left.")
            return USAGE
        if os.environ.get("ACCUMLINT_DEBUG"):
            raise
        _complain(f"internal error: {type(error).__name__}: {error}.", "Please report it with what ACCUMLINT_DEBUG=1 shows.")
    return USAGE


def prepared(arguments: list[str]) -> list[str]:
    """The arguments with the default command put in, and `--add-ignore` without a reason spelled as click wants it."""
    first = arguments[0] if arguments else ""
    if first not in COMMANDS and first not in {"-h", "--help", "-V", "--version"}:
        arguments = ["check", *arguments]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return ["--add-ignore=" if each == "--add-ignore" and at < end else each for at, each in enumerate(arguments)]


def _remedy(error: click.UsageError) -> str:
    """What to try instead."""
    command = error.ctx.info_name if error.ctx is not None and error.ctx.info_name in COMMANDS else None
    if command not in {None, "check"} and command is not None and os.path.isdir(command):
        return f"To lint the folder of this name: accumlint check {command}"
    return f"`accumlint {command} --help` lists the options." if command else "`accumlint --help` lists the commands."


def _complain(message: str, remedy: str = "") -> None:
    lines = " ".join(message.split())
    click.echo(f"accumlint: error: {lines}" + (f" {remedy}" if remedy else ""), err=True)
