"""Output files are replaced at once, and nothing but a regular file is ever replaced."""

import os
import stat

import pytest
from helpers.cases import refused

from attnlab.case.errors import InvalidCase
from attnlab.case.output_file import (
    check_output_file,
    make_output_folder,
    replacing,
    write_bytes,
    write_text,
)


def test_a_file_is_replaced_at_once(tmp_path):
    path = tmp_path / "x.json"
    write_text(path, "old")
    path.chmod(0o640)
    with replacing(path) as part:
        part.write_bytes(b"n\xc3\xa9")
        assert path.read_text() == "old"
    assert path.read_bytes() == b"n\xc3\xa9"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["pipe", "folder", "missing folder", "link to a device"])
def test_only_regular_files_are_replaced(tmp_path, kind):
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/full")
    else:
        path = path / "y"
    before = os.stat(path).st_mode if path.exists() else None
    for write in (lambda: write_bytes(path, b"1"), lambda: check_output_file(path, "save-call")):
        with pytest.raises(InvalidCase) as error:
            write()
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)
    assert (os.stat(path).st_mode if path.exists() else None) == before


def test_a_link_is_followed(tmp_path):
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to("there")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "new"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ZeroDivisionError()])
def test_a_failed_write_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "x"
    path.write_text("old")
    expected = InvalidCase if isinstance(error, OSError) else ZeroDivisionError

    def write():
        with replacing(path) as part:
            part.write_text("half")
            raise error

    with pytest.raises(expected):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with refused("report"):
        make_output_folder(tmp_path / "file" / "x", "report")
    make_output_folder(tmp_path / "a" / "b", "report")
    assert (tmp_path / "a" / "b").is_dir()
