"""What `accumlint doctor` found, for a terminal: the experiment, the hook points, the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accumlint.report.terminal import Line, Span, Tone, cells, escape, pad, paint, paragraph

GIB = 2**30


def render(document: Mapping[str, Any], width: int, *, color: bool) -> str:
    """The text of an examination, as `accumlint.runtime.doctor.examine.document` gives it; `width` in columns."""
    sections = [_machine(document), _experiment(document["experiment"], width)]
    sections += [_verify(document["verify"], width)] if document["verify"] else []
    sections += [_points(document["hook_points"], width)]
    sections += [_frameworks(document["frameworks"], width), _verdict(document, width)]
    lines: list[Line] = []
    for section in sections:
        lines += [*section, []]
    return paint(lines[:-1], color=color) + "\n"


def _machine(document: Mapping[str, Any]) -> list[Line]:
    torch = document["torch"]
    backends = (
        ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in torch["backends"].items()) or "none: built without distributed"
    )
    devices = [f"{each['name']} ({each['memory'] / GIB:.0f} GiB, {each['capability']})" for each in torch["devices"]]
    rows = [
        ("torch", f"{torch['version']}, Python {document['python']}, {document['platform']}"),
        ("backends", backends),
        ("CUDA", "; ".join(devices) or "no device"),
    ]
    return [[Span("Machine", Tone.STRONG)], *([Span(f"  {name:<9} {escape(text)}")] for name, text in rows)]


def _experiment(run: Mapping[str, Any], width: int) -> list[Line]:
    where = f"two ranks, {run['backend']}, {run['device']}, {run['seconds']:.1f} s"
    lines: list[Line] = [
        [Span("Experiment", Tone.STRONG), Span(f"  one update of 20 targets, 2 + 6 and 4 + 8; {where}", Tone.DIM)],
    ]
    if run["failure"]:
        return lines + paragraph("could not be run: " + escape(run["failure"]), width, first="  ", rest="  ", tone=Tone.ERROR)
    rows: list[tuple[str, ...]] = [("", "hook calls", "gradient error", "expected", "")]
    rows += [_row(case) for case in run["cases"]]
    lines += _table(rows)
    for case in run["cases"]:
        for deviation in case["deviations"]:
            lines += paragraph(f"{case['name']}: {deviation}", width, first="  ", rest="    ", tone=Tone.ERROR)
    return lines


def _row(case: Mapping[str, Any]) -> tuple[str, ...]:
    calls = sorted({"none" if each is None else str(each) for each in case["hook_calls"]})
    expected = "-" if case["expected_hook_calls"] is None else str(case["expected_hook_calls"])
    error = "< 1e-15" if case["right"] else "0.0948"
    verdict = "DEVIATES" if case["deviations"] else "as expected"
    return (
        f"{case['name']}: {case['description']}",
        "/".join(calls),
        f"{case['gradient_max_abs_error']:.4g}",
        f"{expected}, {error}",
        verdict,
    )


def _verify(observed: Sequence[Mapping[str, Any]], width: int) -> list[Line]:
    rows: list[tuple[str, ...]] = [("", "reductions", "gradient error", "reports", "expected", "")]
    lines: list[Line] = []
    for each in observed:
        counts = "/".join(sorted({str(count) for count in each["reductions"]}))
        error = "none" if each["gradient_max_abs_error"] is None else f"{each['gradient_max_abs_error']:.4g}"
        found, expected = (", ".join(each[name]) or "nothing" for name in ("codes", "expected_codes"))
        rows.append((each["name"], counts, error, found, expected, "DEVIATES" if each["deviations"] else "as expected"))
        for deviation in each["deviations"]:
            lines += paragraph(f"{each['name']}: {escape(deviation)}", width, first="  ", rest="    ", tone=Tone.ERROR)
    return [[Span("The same under verify", Tone.STRONG), Span("  two updates of each", Tone.DIM)], *_table(rows), *lines]


def _points(points: Sequence[Mapping[str, Any]], width: int) -> list[Line]:
    found = [point for point in points if point["found"]]
    lines: list[Line] = [[Span("Hook points", Tone.STRONG), Span(f"  {len(found)} of {len(points)} found in this torch", Tone.DIM)]]
    rows = [
        (_short(point["names"]), "found" if point["found"] else "MISSING" if point["needed"] else "not there", point["without"])
        for point in points
    ]
    return lines + _table([("", "", "without it not observed"), *rows], dim_last=True)


def _short(names: Sequence[str]) -> str:
    return ".".join(names[0].split(".")[-2:]) if len(names[0]) > 44 else names[0]


def _frameworks(frameworks: Sequence[Mapping[str, Any]], width: int) -> list[Line]:
    there = [each for each in frameworks if each["version"]]
    lines: list[Line] = [[Span("Frameworks", Tone.STRONG)]]
    for each in there:
        name = f"  {each['name']} {escape(each['version'])}: "
        lines += paragraph(name + each["observed"], width, rest="    ")
    absent = ", ".join(each["name"] for each in frameworks if not each["version"])
    return lines + (paragraph(f"not installed: {absent}", width, first="  ", rest="    ", tone=Tone.DIM) if absent else [])


def _verdict(document: Mapping[str, Any], width: int) -> list[Line]:
    if document["status"] == 0:
        return [[Span("All as expected.", Tone.LIVE)]]
    if document["experiment"]["failure"]:
        return [[Span("The experiment could not be run.", Tone.ERROR)]]
    return [[Span("Not as expected:", Tone.ERROR)]] + [
        line for each in document["deviations"] for line in paragraph(escape(each), width, first="  ", rest="    ")
    ]


def _table(rows: Sequence[Sequence[str]], *, dim_last: bool = False) -> list[Line]:
    """Columns as wide as their widest cell, the first row a heading."""
    widths = [max(cells(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines: list[Line] = []
    for number, row in enumerate(rows):
        line: Line = [Span("  ")]
        for at, (cell, wide) in enumerate(zip(row, widths, strict=True)):
            line.append(Span(pad(cell, wide) + "  ", Tone.DIM if number == 0 or (dim_last and at == len(row) - 1) else _tone(cell)))
        lines.append(line)
    return lines


def _tone(cell: str) -> Tone:
    return {"DEVIATES": Tone.ERROR, "MISSING": Tone.ERROR, "as expected": Tone.LIVE, "found": Tone.LIVE}.get(cell, Tone.PLAIN)
