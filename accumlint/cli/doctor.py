"""`accumlint doctor`: an experiment with a known outcome on this machine, and what `accumlint verify` can observe here."""

from __future__ import annotations

import sys

import click

from accumlint.cli.output import COLOR, coloured, width, write

TORCH_MISSING = 2
NOT_RUN = 3


@click.command("doctor")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the two ranks compute. `auto` takes NCCL where there are two CUDA devices, else gloo on the CPU; "
    "`cuda` with one device takes gloo on its tensors.",
)
@click.option("--timeout", type=click.FloatRange(min=1), default=120.0, show_default=True, metavar="S", help="Seconds for each part.")
@click.option("--quick", is_flag=True, help="Leave out the runs of the experiment under verify.")
@click.option("--output-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@COLOR
def doctor(device: str, timeout: float, quick: bool, output_format: str, color: str) -> int:
    """Check that this machine's torch and the measurements agree.

    Two ranks accumulate one update of 20 targets in five ways, four right and one wrong, beside the full batch: calls of
    the communication hook and gradient errors must come out as known, and so must what `accumlint verify` measures and
    reports of each when it runs them. Then: which hook points this torch has, backends,
    devices and frameworks, and what `accumlint verify` sees of them.

    Exit status: 0 all as expected, 1 something deviates, 2 torch is not installed, 3 the experiment could not be run.
    """
    from accumlint.runtime.doctor.examine import PARTS, document, examine, torch_is_installed
    from accumlint.runtime.doctor.processes import NotRunError

    if not torch_is_installed():
        click.echo("accumlint: error: torch is not installed in this Python; `pip install accumlint[verify]` brings it.", err=True)
        return TORCH_MISSING
    try:
        examination = examine(device, timeout, PARTS - {"verify"} if quick else PARTS, _say)
    except NotRunError as error:
        _say("")
        click.echo(f"accumlint: error: {error}", err=True)
        return NOT_RUN
    _say("")
    found = document(examination)
    if output_format == "json":
        import json

        write(json.dumps(found, indent=2) + "\n")
    else:
        from accumlint.report.doctor import render

        write(render(found, width(), color=coloured(color)))
    return examination.status


def _say(text: str) -> None:
    """What goes on, in one line of a terminal that the next one draws over; nothing elsewhere."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text and text + ' …'}")
        sys.stderr.flush()
