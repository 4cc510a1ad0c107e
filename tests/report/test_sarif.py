"""SARIF as GitHub's code scanning wants it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accumlint.findings import Applicability, Confidence, Edit, Finding, Fix
from accumlint.report import render
from accumlint.rule import Rule
from accumlint.trace import Place

Rules = dict[str, Rule]
Sources = Callable[[str], str]
ROOT = Path("/project")


def _run(findings: list[Finding], rules: Rules, sources: Sources) -> dict[str, Any]:
    document = json.loads(render("sarif", findings, rules, sources, width=80, color=True, root=ROOT))
    assert document["version"] == "2.1.0"
    assert document["$schema"].endswith("sarif-2.1.0.json")
    [run] = document["runs"]
    assert isinstance(run, dict)
    return run


def test_rules_carry_their_page(finding: Finding, rules: Rules, sources: Sources) -> None:
    run = _run([finding], rules, sources)
    first, second = run["tool"]["driver"]["rules"]
    assert first["id"] == "ACC101"
    assert first["shortDescription"]["text"] == "Only the backward runs inside no_sync."
    assert first["fullDescription"]["text"] == "Reports a backward inside no_sync."
    assert first["help"]["markdown"] == rules["ACC101"].page
    assert first["defaultConfiguration"] == {"level": "error"}
    assert len(second["fullDescription"]["text"]) == 1024
    assert "security-severity" not in json.dumps(run)


def test_a_result(finding: Finding, rules: Rules, sources: Sources) -> None:
    run = _run([finding], rules, sources)
    [result] = run["results"]
    assert run["originalUriBaseIds"]["%SRCROOT%"]["uri"].startswith("file:///")
    assert run["originalUriBaseIds"]["%SRCROOT%"]["uri"].endswith("/project/")
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "ACC101"
    assert result["level"] == "error"
    assert result["locations"] == [
        {
            "physicalLocation": {
                "artifactLocation": {"uri": "train.py", "uriBaseId": "%SRCROOT%"},
                "region": {"startLine": 7, "startColumn": 13, "endLine": 7, "endColumn": 28},
            }
        }
    ]


def test_uris_are_relative_and_quoted(finding: Finding, rules: Rules, sources: Sources) -> None:
    for path, uri in (("/project/src/a b%.py", "src/a%20b%25.py"), ("/elsewhere/x.py", "file:///elsewhere/x.py")):
        [result] = _run([replace(finding, place=Place(path, 1), events=())], rules, sources)["results"]
        artifact = result["locations"][0]["physicalLocation"]["artifactLocation"]
        assert artifact["uri"] == uri
        assert ("uriBaseId" in artifact) == (not uri.startswith("file:"))


def test_the_window_is_a_code_flow(finding: Finding, rules: Rules, sources: Sources) -> None:
    [result] = _run([finding], rules, sources)["results"]
    [flow] = result["codeFlows"]
    steps = flow["threadFlows"][0]["locations"]
    assert [step["executionOrder"] for step in steps] == list(range(1, len(finding.events) + 1))
    assert [step["importance"] for step in steps].count("essential") == len(finding.guilty)
    assert steps[3]["location"]["message"]["text"] == "micro-batch 1: backward, sync off, weight of a target 1/(3n)"


def test_precision_is_that_of_the_least_sure_finding(finding: Finding, rules: Rules, sources: Sources) -> None:
    run = _run([finding, replace(finding, confidence=Confidence.MEDIUM)], rules, sources)
    assert [rule["properties"]["precision"] for rule in run["tool"]["driver"]["rules"]] == ["medium", "high"]


def test_fingerprints_follow_the_line_and_not_its_number(finding: Finding, rules: Rules, sources: Sources) -> None:
    def prints(findings: list[Finding], source: Sources) -> list[str]:
        return [result["partialFingerprints"]["primaryLocationLineHash"] for result in _run(findings, rules, source)["results"]]

    moved = replace(finding, place=replace(finding.place, line=9, end_line=9))
    here = prints([finding], sources)
    assert here == prints([moved], lambda path: "\n\n" + sources(path))
    assert here != prints([replace(finding, code="ACC307")], sources)
    twice = prints([finding, finding], sources)
    assert twice[0] == here[0] != twice[1]


def test_fixes_that_may_be_applied_are_offered(finding: Finding, rules: Rules, sources: Sources) -> None:
    edit = Edit(Place("train.py", 4, 9, 4, 10), "new")
    fixed = replace(finding, fix=Fix(Applicability.UNSAFE, "Widen.", (edit,)))
    shown = replace(finding, fix=Fix(Applicability.DISPLAY, "Widen.", (edit,)))
    first, second = _run([fixed, shown], rules, sources)["results"]
    [change] = first["fixes"][0]["artifactChanges"]
    assert change["replacements"][0]["insertedContent"] == {"text": "new"}
    assert "fixes" not in second


def test_a_finding_of_no_rule_and_no_place(sources: Sources) -> None:
    [result] = _run([Finding("ACC000", Place("a.py", 0, 0), "Does not parse.")], {}, sources)["results"]
    assert "ruleIndex" not in result
    assert result["locations"][0]["physicalLocation"]["region"] == {"startLine": 1, "startColumn": 1}
