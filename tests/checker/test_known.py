"""Known findings: they do not count, and one that no longer appears does."""

import json

import pytest
from helpers.plugins import RIGHT, planted

from attnlab.case.errors import InvalidCase
from attnlab.checker.finding import KnownFinding, read_known
from attnlab.checker.library import check_library
from attnlab.checker.plan import Plan
from attnlab.tasks.store import Shard

LINK = "https://example.org/issues/7#note"
FIELDS = {"op": "unified_attention", "kind": "wrong_output", "link": LINK}
DOUBLED = KnownFinding(**FIELDS, diagnosis="scale_doubled")
OTHER = KnownFinding(**FIELDS, diagnosis="sink_ignored")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Return the plan of a kernel with a doubled scale."""
    backend = planted(tmp_path_factory.mktemp("k"), RIGHT.replace("* scale", "* 2 * scale"))
    return Plan(backend=backend, ops=backend.ops, cases=1)


@pytest.fixture(scope="module")
def store(plan, tmp_path_factory):
    """Return a store in which the check has run, so that each report is made of its outcomes."""
    out = tmp_path_factory.mktemp("known") / "store"
    check_library(plan, out=out)
    return out


@pytest.mark.parametrize(
    ("known", "code", "shown", "missing"),
    [
        ([], 1, 0, 0),
        ([DOUBLED], 0, 1, 0),
        ([KnownFinding(**FIELDS)], 0, 1, 0),
        ([OTHER], 1, 0, 1),
        ([DOUBLED, OTHER], 1, 1, 1),
        ([KnownFinding(**{**FIELDS, "op": "merge_attn_states"}), DOUBLED], 0, 1, 0),
    ],
)
def test_exit_codes(plan, store, known, code, shown, missing):
    report = check_library(plan, out=store, known=known)
    assert report.exit_code == code
    assert (len(report.known), len(report.missing)) == (shown, missing)
    assert len(report.findings) == 1
    assert len(report.unexpected) == 1 - shown


def test_a_shard_misses_nothing(plan):
    """What does not appear in a part of the cases may appear in another."""
    report = check_library(plan, shard=Shard(index=1, count=2), known=[OTHER])
    assert report.missing == []


def test_text_and_json(tmp_path):
    text, document = tmp_path / "known.txt", tmp_path / "known.json"
    text.write_text(
        f"# faults that are reported\n\nunified_attention wrong_output scale_doubled {LINK}  # a word\n"
        f"unified_attention fails {LINK}\n"
        f"decode_attention_fwd wrong_output block offset beyond 2^31 elements {LINK}\n"
    )
    entries = read_known(text)
    assert entries[0] == DOUBLED
    assert [entry.diagnosis for entry in entries[1:]] == ["*", "block offset beyond 2^31 elements"]
    document.write_text(json.dumps([DOUBLED.to_dict(), FIELDS]))
    assert read_known(document) == [DOUBLED, KnownFinding(**FIELDS)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "unified_attention", "line 1"),
        ("a.txt", "softmax fails http://x", "op in line 1"),
        ("a.txt", "unified_attention slow http://x", "kind in line 1"),
        ("a.json", "{}", "a list"),
        ("a.json", "[{}]", "entry 0"),
        ("a.json", "[", "JSON"),
    ],
)
def test_wrong_entries_are_named(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidCase, match=words):
        read_known(tmp_path / name)
