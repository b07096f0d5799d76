"""The files of ``attnlab check`` and ``attnlab merge``, and the composite action that writes them."""

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import jsonschema
import pytest
import yaml
from helpers.sarif import SCHEMA

from attnlab.cli.main import main

ROOT = Path(__file__).parents[2]
WRONG = """
def kernel(call):
    call.output.zero_()


kernel.op = "merge_attn_states"
"""
OP = "merge_attn_states"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a wrong kernel in the current folder."""
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    return "wrong.py:kernel"


@pytest.mark.slow
def test_check_and_merge_write_the_same_files(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finding is at the line of the kernel. The files of merged shards say the same."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    argv = ["check", kernel, "--cases", "2", "--engine", "local:1", "--out", "store"]
    files = [["--sarif", f"{name}.sarif", "--junit", f"{name}.xml"] for name in ("one", "two")]
    assert main([*argv, *files[0]]) == 1
    assert main(["merge", "store", *files[1]]) == 1
    logs = [json.loads(Path(f"{name}.sarif").read_text()) for name in ("one", "two")]
    assert logs[0] == logs[1]
    jsonschema.validate(logs[0], SCHEMA)
    place = logs[0]["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("wrong.py", 2)
    root = ET.parse("one.xml").getroot()
    assert [suite.get("name") for suite in root] == [OP]
    assert int(root.get("failures")) > 0
    assert (tmp_path / "summary.md").read_text().count("## attnlab check") == 2


def _action() -> dict:
    return yaml.safe_load((ROOT / "action.yml").read_text())


def _run_action(folder: Path, **inputs: str) -> tuple[int, dict[str, str], list[str]]:
    """Run the action's check with an attnlab that records its arguments; return code, outputs, arguments."""
    step = next(step for step in _action()["runs"]["steps"] if step.get("id") == "check")
    given = {name: str(one.get("default", "")) for name, one in _action()["inputs"].items()}
    given |= inputs
    names = {
        name: value.strip("${ }").removeprefix("inputs.") for name, value in step["env"].items()
    }
    fake = folder / "bin" / "attnlab"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "open('argv.json', 'w').write(json.dumps(sys.argv[1:]))\n"
        "for flag in ('--sarif', '--junit', '--markdown'):\n"
        "    if os.environ['CODE'] != '2':\n"
        "        open(sys.argv[sys.argv.index(flag) + 1], 'w').write('{}')\n"
        "sys.exit(int(os.environ['CODE']))\n"
    )
    fake.chmod(0o755)
    output = folder / "output"
    output.write_text("")
    environment = {
        **os.environ,
        **{name: given[field] for name, field in names.items()},
        "CODE": given.get("code", "0"),
        "GITHUB_OUTPUT": str(output),
        "RUNNER_TEMP": str(folder),
        "PATH": f"{fake.parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(["bash", "-e", "-c", step["run"]], env=environment, cwd=folder)
    outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
    return done.returncode, outputs, json.loads((folder / "argv.json").read_text())


def test_the_action_passes_its_inputs(tmp_path: Path) -> None:
    """Each kind of source has its flag; text with spaces and quotes stays one word."""
    (tmp_path / "known file.txt").write_text("")
    nasty = "a vllm'; exit 9 $(false).whl"
    for check, words in {
        "mine.py:fn": ["mine.py:fn"],
        "plugin:name": ["plugin:name"],
        "installed": ["--installed", "--device", "cpu"],
        nasty: ["--source", nasty, "--device", "cpu"],
    }.items():
        code, _, argv = _run_action(
            tmp_path, check=check, ops=f"{OP} unified_attention", known="known file.txt", cases="3"
        )
        assert code == 0
        ops = ["--op", OP, "--op", "unified_attention"]
        rest = [*ops, "--known", "known file.txt", "--cases", "3"]
        assert argv[: argv.index("--sarif")] == ["check", *words, *rest]


@pytest.mark.parametrize(
    ("code", "fail", "expected"),
    [("0", "true", 0), ("1", "true", 1), ("1", "false", 0), ("3", "false", 0), ("2", "false", 2)],
)
def test_the_action_reports_the_exit_code(
    tmp_path: Path, code: str, fail: str, expected: int
) -> None:
    """Findings fail the step unless ``fail`` is false; bad input always does. The files are outputs."""
    returned, outputs, _ = _run_action(tmp_path, check="mine.py:fn", code=code, fail=fail)
    assert returned == expected
    assert outputs["exit-code"] == code
    assert Path(outputs["sarif"]).is_file() if code != "2" else "sarif" not in outputs


GH = """#!{python}
import json, os, subprocess, sys
words, file = sys.argv[1:], "comments.json"
comments = json.load(open(file))
fields = dict(word.split("=", 1) for word in words if word.startswith("body="))
if "--jq" in words:
    assert words[1:3] == ["--paginate", "repos/o/r/issues/7/comments"]
    query = words[words.index("--jq") + 1]
    subprocess.run(["jq", query], input=json.dumps(comments), text=True, check=True)
elif words[words.index("--method") + 1] == "POST":
    assert "repos/o/r/issues/7/comments" in words
    comments.append({{"id": 10 + len(comments), **fields}})
else:
    assert "repos/o/r/issues/comments/11" in words
    comments[1] |= fields
json.dump(comments, open(file, "w"))
"""


def test_the_action_posts_one_comment_and_updates_it(tmp_path: Path) -> None:
    """A clean first run posts none; findings post one; a later run, clean or not, updates it."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed, which stands for gh's own")
    step = next(step for step in _action()["runs"]["steps"] if step["name"] == "Comment")
    gh = tmp_path / "bin" / "gh"
    gh.parent.mkdir()
    gh.write_text(GH.format(python=sys.executable))
    gh.chmod(0o755)
    comments, text = tmp_path / "comments.json", tmp_path / "attnlab.md"
    comments.write_text(
        json.dumps([{"id": 10, "body": "by a person, about <!-- attnlab a.py:f -->"}])
    )
    places = {"COMMENTS": "repos/o/r/issues/7/comments", "EDIT": "repos/o/r/issues/comments"}
    given = {**places, "FILE": str(text), "MARK": "<!-- attnlab a.py:f -->", "GH_TOKEN": "none"}
    environment = {**os.environ, **given, "PATH": f"{gh.parent}:{os.environ['PATH']}"}
    seen = []
    for code, body in (("0", "clean"), ("1", "$(false) `x` **2 findings**"), ("0", "clean again")):
        text.write_text(body + "\n")
        command = ["bash", "-e", "-o", "pipefail", "-c", step["run"]]
        subprocess.run(command, env={**environment, "CODE": code}, cwd=tmp_path, check=True)
        seen.append([one["body"].split("\n")[-1] for one in json.loads(comments.read_text())[1:]])
    assert seen == [[], ["$(false) `x` **2 findings**"], ["clean again"]]
    assert json.loads(comments.read_text())[0]["body"].startswith("by a person")


def test_the_action_declares_what_it_uses() -> None:
    """Every input and output that a step names exists, and no input is part of a command."""
    action = _action()
    text = (ROOT / "action.yml").read_text()
    for name in ("inputs", "outputs"):
        assert all(one["description"] for one in action[name].values())
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]
    for name in action["inputs"]:
        assert f"inputs.{name}" in text
