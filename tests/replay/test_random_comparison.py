"""Random cases on two kernels: which side is wrong, and that equal bits are not asked for."""

import json

from helpers.plugins import RIGHT
from helpers.saved_calls import WRONG, kernel_file

from attnlab.cli.main import main


def compared(capsys, *words):
    code = main(["compare", *words, "--random", "5", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_side_that_is_wrong_is_named(capsys, tmp_path):
    right, wrong = kernel_file(tmp_path, RIGHT, "right"), kernel_file(tmp_path, WRONG, "wrong")
    code, found = compared(capsys, right, "--against", wrong)
    assert code == found["exit_code"] == 1
    count = sum(one["outcomes"][1]["status"] == "mismatch" for one in found["cases"])
    assert count > 1
    assert found["sentences"] == [f"{wrong} is wrong in {count} of 5 cases"]
    code, found = compared(capsys, wrong, "--against", right)
    assert code == 1
    assert found["sentences"] == [f"{wrong} is wrong in {count} of 5 cases"]
    assert found["cases"][0]["run"].startswith("attnlab run ")


def test_right_kernels_with_other_bits_agree(capsys, tmp_path):
    right = kernel_file(tmp_path, RIGHT, "right")
    code, found = compared(
        capsys, right, "--against", "model", "--html", str(tmp_path / "page.html")
    )
    assert (code, len(found["cases"])) == (0, 5)
    assert all(one["status"] == "match" for case in found["cases"] for one in case["outcomes"])
    assert "both are right" in (tmp_path / "page.html").read_text()
