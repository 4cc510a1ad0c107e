"""`python -m tests.runtime.agree [PART OF A NAME]`: lints and runs every fixture, and prints where the two halves differ."""

from __future__ import annotations

import sys
from pathlib import Path

from accumlint.cli.rehearsed import rehearsed
from accumlint.findings import Severity
from accumlint.rule import catalogue
from accumlint.runtime.measure import Question, measurement
from accumlint.verdict import State
from tests.runtime.runs import measure


def main() -> int:
    import re

    parts = sys.argv[1:] or [""]
    root = Path(__file__).resolve().parents[2] / "fixtures"
    counts = {"agree": 0, "missing": 0, "extra": 0}
    for path in sorted(root.glob("*/*.py")):
        if not any(part in str(path) for part in parts) or "acc000" in str(path):
            continue
        text = path.read_text(encoding="utf-8")
        found = re.search(r"^# nproc: (\d+)", "\n".join(text.split("\n")[:4]), re.MULTILINE)
        expected = sorted(
            {
                (code, number)
                for number, line in enumerate(text.split("\n"), 1)
                for code in re.findall(r"ACC\d{3}", line.partition("# expect:")[2])
            }
        )
        reports = measure(path, int(found.group(1)) if found else 1)
        try:
            shown = measurement(
                reports,
                Question(1, tuple(catalogue().values())),
                rehearsed=rehearsed([report for report in reports if report.get("stacks")]),
            )
            findings = {(finding.code, finding.place.line) for finding in shown.findings if finding.severity is not Severity.INFO}
            wrong = [
                f"{check.topic.value}: {check.state.value}" for check in shown.checks if check.state is State.VIOLATED and not findings
            ]
        except Exception as error:
            import traceback

            traceback.print_exc()
            findings, wrong = {(f"{type(error).__name__}: {error}", 0)}, []
        missing = [each for each in expected if each[0] not in {code for code, _ in findings}]
        extra = [each for each in sorted(findings) if each[0] not in {code for code, _ in expected}]
        moved = [each for each in sorted(findings) if each not in expected and each not in extra]
        name = f"{path.parent.name}/{path.name}"
        troubles = {trouble for report in reports for trouble in report.get("troubles", ())}
        if missing or extra or troubles or wrong:
            print(
                name,
                [report["ended"] for report in reports],
                "MISSING" if missing else "",
                missing or "",
                "EXTRA" if extra else "",
                extra or "",
                "moved" if moved else "",
                moved or "",
                *troubles,
                flush=True,
            )
        counts["missing"] += bool(missing)
        counts["extra"] += bool(extra)
        counts["agree"] += not missing and not extra
    print(counts)
    return 0


if __name__ == "__main__":
    import torch  # noqa: F401

    sys.exit(main())
