"""attnlab capture: exit codes and output."""

import json
import sys

from attnlab.cli.main import main
from attnlab.serving.capture_state import Observation, RecordFile, Tally

FAULT = Observation(kind="never_written", text="a slot", layer="layers.3", step=7, request="r1")


def record(folder, *found: Observation) -> None:
    records = RecordFile(folder)
    records.write("started", {"rank": 0})
    tally = Tally(records)
    tally.counts["steps"] = 5
    tally.observe(found)
    tally.write()


def test_the_report_of_a_folder(tmp_path, capsys):
    record(tmp_path, FAULT)
    assert main(["capture", "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    for words in ("1 fault in 5 steps", "never_written", "step 7", "layers.3", "request r1"):
        assert words in text
    assert main(["capture", "--out", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["found"][0]["step"] == 7


def test_exit_codes(tmp_path, capfd):
    run = ["capture", "--json", "--out"]
    fails = ["--", sys.executable, "-c", "print('out'); raise SystemExit(5)"]
    assert main([*run, str(tmp_path / "a"), *fails]) == 5
    shown = capfd.readouterr()
    assert "out" in shown.err
    assert json.loads(shown.out)["exit_code"] == 5
    passes = ["--", sys.executable, "-c", "pass"]
    assert main([*run, str(tmp_path / "b"), *passes]) == 3  # nothing was checked
    record(tmp_path / "c")
    assert main([*run, str(tmp_path / "c")]) == 0


def test_the_commands_own_flags_are_kept(tmp_path, capfd):
    code = "import sys; print(sys.argv[1:])"
    words = ["--", sys.executable, "-c", code, "--json", "--out", "x", "--", "--layer=3"]
    main(["capture", "--out", str(tmp_path), *words])
    assert "['--json', '--out', 'x', '--', '--layer=3']" in capfd.readouterr().out
