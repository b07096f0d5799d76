"""The report of a check as JUnit XML, as SARIF and as a summary."""

import dataclasses
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import jsonschema
import pytest
from helpers.check_report import KNOWN, LINK, MERGE, NEW, OUTSIDE, PREFILL, REPORT, SOUND, UNIFIED
from helpers.sarif import SCHEMA

from attnlab.case.errors import InvalidCase
from attnlab.checker.finding import KINDS, OBSERVATIONS
from attnlab.diagnosis.claims import KernelLine
from attnlab.reports.check_pages import append_summary, junit, sarif, summary


def _cases(report) -> dict[tuple[str, str], ET.Element]:
    root = ET.fromstring(junit(report))
    return {(suite.get("name"), case.get("name")): case for suite in root for case in suite}


def test_junit_has_a_test_case_per_kind_of_each_op() -> None:
    """Names do not depend on the findings; the counts of a suite are those of its cases."""
    cases = _cases(REPORT)
    for op in REPORT.ops:
        assert {(op, kind) for kind in KINDS} <= set(cases)
    assert {(UNIFIED, kind) for kind in KINDS} == set(_cases(SOUND))
    root = ET.fromstring(junit(REPORT))
    for suite in root:
        assert int(suite.get("tests")) == len(suite)
        for name, tag in (("failures", "failure"), ("skipped", "skipped")):
            assert int(suite.get(name)) == len(suite.findall(f"testcase/{tag}"))
    assert (root.get("failures"), root.get("errors")) == ("2", "0")  # new, and missing


def test_junit_tells_new_known_missing_and_not_run_apart() -> None:
    """Only the new finding and the missing one are failures."""
    cases = _cases(REPORT)
    failure = cases[PREFILL, "fails"].find("failure")
    assert failure.get("type") == "fails"
    assert NEW.case.to_cli() in failure.text
    assert LINK in cases[UNIFIED, "wrong_output"].find("skipped").get("message")
    assert cases[UNIFIED, "fails"].find("*") is None
    skipped = [case for (op, _), case in cases.items() if op == MERGE]
    assert all(case.find("skipped") is not None for case in skipped)
    assert len(skipped) == len(KINDS) + 1
    missing = [c for (op, name), c in cases.items() if op == UNIFIED and "no longer" in name]
    assert [case.find("failure").get("message") for case in missing] == [LINK]


def test_sarif_has_the_properties_of_the_standard() -> None:
    """SARIF 2.1.0: required properties, no others, and their values."""
    for report in (REPORT, SOUND):
        log = json.loads(json.dumps(sarif(report)))
        jsonschema.validate(log, SCHEMA)
    del log["runs"][0]["tool"]["driver"]["name"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(log, SCHEMA)


def test_sarif_results_have_rules_lines_and_suppressions() -> None:
    """The line that the evidence names, else that of the op; a known finding is suppressed."""
    run = sarif(REPORT)["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [*KINDS, *OBSERVATIONS]
    results = {result["ruleId"]: result for result in run["results"]}
    assert all(rules[result["ruleIndex"]]["id"] == kind for kind, result in results.items())
    places = {}
    for kind, result in results.items():
        physical = result["locations"][0]["physicalLocation"]
        uri, line = physical["artifactLocation"]["uri"], physical["region"]["startLine"]
        places[kind] = uri.rpartition("/")[2], line
    assert places == {
        "wrong_output": ("triton_unified_attention.py", 700),
        "fails": ("prefix_prefill.py", 600),
        "out_of_bounds": ("helper_kernels.py", 321),
        "int32_wrap": ("prefix_prefill.py", 55),
    }
    assert {kind for kind, result in results.items() if "suppressions" in result} == {KNOWN.kind}
    assert {results[kind]["level"] for kind in ("fails", OUTSIDE.kind)} == {"error", "note"}
    invocation = run["invocations"][0]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 1)
    assert len(invocation["toolExecutionNotifications"]) == 2  # not run, and missing
    prints = [result["partialFingerprints"]["finding/v1"] for result in run["results"]]
    assert len(set(prints)) == len(prints)


def test_a_fingerprint_survives_a_change_of_lines_and_evidence() -> None:
    """Code scanning recognises a finding again after the file has changed."""
    moved = dataclasses.replace(NEW, evidence="prefix_prefill.py:9 reads", seen=4)
    before, after = (
        sarif(dataclasses.replace(REPORT, findings=[finding], known=[]))["runs"][0]["results"][0]
        for finding in (NEW, moved)
    )
    assert before["partialFingerprints"] == after["partialFingerprints"]
    assert before["locations"] != after["locations"]


def test_sarif_states_the_located_lines_first() -> None:
    """The first line is the location of the result with its reason, the others are related locations."""
    lines = tuple(
        KernelLine(
            file="ops/a.py", line=n, source="x", score=1.0, evidence="edit", reason=f"reason {n}"
        )
        for n in (7, 9)
    )
    finding = dataclasses.replace(REPORT.findings[0], lines=lines)
    report = dataclasses.replace(REPORT, findings=[finding], known=[])
    result = sarif(report)["runs"][0]["results"][0]
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("ops/a.py", 7)
    assert "reason 7" in result["message"]["text"]
    related = result["relatedLocations"][0]
    assert related["physicalLocation"]["region"]["startLine"] == 9
    assert related["message"]["text"] == "reason 9"


def test_the_summary_is_a_table_that_markdown_shows() -> None:
    """A row for each finding; text from a kernel adds no column and no line."""
    rows = [line for line in summary(REPORT).splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(REPORT.findings)
    assert {row.replace("\\|", "").count("|") for row in rows} == {rows[0].count("|")}
    assert f"]({LINK})" in summary(REPORT)
    assert not [line for line in summary(SOUND).splitlines() if line.startswith("|")]


def test_the_summary_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier steps of the job write to the same file. Without the variable nothing is written."""
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    append_summary(REPORT)
    assert path.read_text() == "before\n"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(path))
    append_summary(REPORT)
    assert path.read_text() == "before\n" + summary(REPORT)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    with pytest.raises(InvalidCase):
        append_summary(REPORT)
