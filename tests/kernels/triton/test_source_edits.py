"""Edits of a kernel's text: the kinds of faults whose inverse they contain."""

import ast

import pytest

from attnlab.kernels.triton.kernel_text import (
    overwriting,
    roles,
    slice_of,
    statement_lines,
    without_unused,
)
from attnlab.kernels.triton.source_edits import Edit, edits

CAUSAL = "tl.where(rows[:, None] >= keys[None, :], q, float('-inf'))"
# What a kernel has, what it should have, and the cost of the edit.
FAULTS = [
    ("splits = length // parts", "splits = tl.cdiv(length, parts)", 1),
    ("first = cdiv_fn(length, parts)", "first = length // parts", 1),
    ("p = tl.exp(m - new_m)", "p = tl.exp(new_m - m)", 1),
    ("s = tl.dot(k, q)", "s = tl.dot(q, k)", 1),
    ("s = -slope * d", "s = slope * d", 1),
    ("p = tl.exp2(s)\nr = tl.exp2(m)", "p = tl.exp(s)\nr = tl.exp(m)", 2),
    ("mask = d < n\ns = tl.dot(q, k)", "mask = d < n\ns = tl.where(mask, tl.dot(q, k), float('-inf'))", 2),
    ("p = tl.min(rows) - keys", "p = rows - keys", 1),
    ("p = tl.minimum(n - m, 0)", "p = n - m", 1),
    ("p = n + m", "p = tl.maximum(n, m)", 1),
    ("a = head * stride_h\nb = rows % n * stride_q", "a = head * stride_h\nb = head * stride_q", 2),
    ("acc = q\nacc = q * 2", "acc = q\nacc = acc", 2),
    ("r = m * alpha\nacc = q\nacc += p", "r = m * alpha\nacc = q\nacc = acc * alpha + (p)", 3),
    ("m = m * alpha\nacc = dot(p, acc)", "m = m * alpha\nacc = dot(p, acc * alpha[:, None])", 1),
    ("m, r = step(m)\nacc += p", "m, r = step(m)\nacc = acc * r[:, None] + (p)", 1),
    ("a = m_i - n\np = tl.exp(m_i)", "a = m_i - n\np = tl.exp(m_i - m_new)", 3),
    ("s = q\nr = rows[:, None] + keys[None, :]", "s = " + CAUSAL + "\nr = rows[:, None] + keys[None, :]", 3),
    ("a = d_mask[:, None]\nk = tl.load(p, mask=n < m)",
     "a = d_mask[:, None]\nk = tl.load(p, mask=(n < m) & d_mask[None, :])", 3),
    ("a = m_new + m_i * 16", "a = m_i + m_new * 16", 2),
    ("s = tl.trans(m_i) - q", "s = m_new - q", 2),
    ("p = tl.max(m_i, 1)", "p = tl.max(tl.maximum(m_i, m_new), 1)", 3),
    ("a = rows % n\nb = base + stride_q", "a = rows % n\nb = base + stride_q * n", 3),
    ("a = head * stride_h\nb = base + stride_q", "a = head * stride_h\nb = base + stride_q * head", 3),
]  # fmt: skip
ARGUMENTS = "q, k, m, m_i, m_new, alpha, slope, rows, keys, n, d, p, base, length, parts, stride_h, stride_q"


@pytest.mark.parametrize(("faulty", "right", "cost"), FAULTS)
def test_the_inverse_of_a_fault_is_among_the_edits(faulty, right, cost):
    text = kernel(faulty)
    found = edits(text, set(statement_lines(text).values()), cost, text)
    assert plain(kernel(right)) in [plain(edit.apply(text)) for edit in found]


@pytest.mark.parametrize(
    ("body", "before", "after", "edited"),
    [
        ("acc = x * tl.load(p)", "x * tl.load(p)", "x / tl.load(p)", "acc = x * (1 / tl.load(p))"),
        ("acc = x * tl.load(p)", "x * tl.load(p)", "(x)", "acc = x * (1)"),
        ("acc = tl.load(p) * x", "tl.load(p) * x", "tl.load(m) * x", "acc = (tl.load(m)) * x"),
        ("acc = x + n", "x + n", "x - n", "acc = x + (0 - n)"),
        ("acc = x * stride_q", "stride_q", "stride_h", "acc = x * (stride_h)"),
        ("y = n\nacc = x + n", "n", "d", "y = (d)\nacc = x + (d)"),  # wherever it is read
        ("acc = x * tl.load(p)", "x * tl.load(p)", "y * tl.load(p)", None),  # another operand
        ("acc = x * tl.load(p)", "x * tl.load(p)", "x + tl.load(p)", None),  # no factor does this
        ("acc = x * tl.load(p)", "tl.load(p)", "y", None),  # y may have many values
        ("acc = p - x", "p - x", "p + x", None),  # as many values as x
        ("acc = x * tl.load(p)\ny = p + x", "x * tl.load(p)", "x / tl.load(p)", None),
        ("acc = x * tl.load(p + x)", "x * tl.load(p + x)", "(x)", None),  # one of many numbers
        ("acc = x < n", "x < n", "x <= n", None),
        ("acc = x < n", "x < n", "x < n - 1", "acc = x < (n - 1)"),
        ("acc = n < x", "n < x", "n + d < x", "acc = (n + d) < x"),
    ],
)
def test_another_value_of_an_argument_may_do_what_an_edit_does(body, before, after, edited):
    text = kernel(body)
    start = text.encode().index(before.encode(), text.index("\n"))
    end = start + len(before.encode())
    given = {"line": 2, "statement": 2, "start": start, "end": end, "cost": 1}
    found = Edit(**given, before=before, after=after).of_argument(text)
    assert (None if found is None else found[1].apply(text)) == (edited and kernel(edited))


CHOICES = """def kernel(a, b):
    if a < b:
        p = 1
    elif a > 2 * b:
        p = 2
        p = 3
    else:
        p = tl.where(a == b, p, q + 1)
    r = p if a <= b else q
"""


@pytest.mark.parametrize(
    ("before", "changed"),
    [
        ("a < b", [("a < b", "(False)", (3, 3)), ("a < b", "(True)", (4, 8))]),
        ("2 * b", [("a > 2 * b", "(False)", (5, 6)), ("a > 2 * b", "(True)", (8, 8))]),
        (
            "a == b",
            [
                ("tl.where(a == b, p, q + 1)", "(p)", (0, 0)),
                ("tl.where(a == b, p, q + 1)", "(q + 1)", (0, 0)),
            ],
        ),
        ("a <= b", [("p if a <= b else q", "(p)", (0, 0)), ("p if a <= b else q", "(q)", (0, 0))]),
        ("q + 1", []),
    ],
)
def test_a_choice_can_be_switched_off(before, changed):
    """The edits of what a choice depends on, not those of its alternatives."""
    start = CHOICES.encode().index(before.encode())
    end = start + len(before)
    edit = Edit(line=1, statement=1, start=start, end=end, before=before, after="b", cost=1)
    found = list(edit.switches(CHOICES))
    assert [(one.before, one.after, one.lines) for one in found] == changed
    for one in found:
        ast.parse(one.apply(CHOICES))


def test_names_that_share_most_parts_come_first():
    """The last but one is the stride of keys; "v" and "0" are parts of names, too."""
    names = "stride_k_cache_0, stride_v_cache_0, stride_k_cache_1, stride_v_cache_1"
    text = f"def kernel({names}):\n    a = b * stride_v_cache_1\n"
    found = edits(text, set(statement_lines(text).values()), 2, text)
    after = [one.after for one in found if one.before == "stride_v_cache_1"]
    assert after.index("stride_v_cache_0") < after.index("stride_k_cache_0")


def test_an_edit_of_a_short_text_is_moved_to_the_whole_one():
    text = kernel("if d:\n    a = q + 1\nelse:\n    a = q + 22\nb = a < n\nc = a < n")
    short = without_unused(text, {1, 2, 3, 6, 7})
    found = edits(short, {6, 7}, 1, text) + edits(short, {6, 7}, 2, text)
    assert any(edit.more for edit in found)
    for edit in found:
        moved = edit.moved(short, text)
        assert moved.apply(text).splitlines()[5:] == edit.apply(short).splitlines()[5:]
        assert moved.apply(text).splitlines()[:5] == text.splitlines()[:5]


def kernel(body: str) -> str:
    """Return the text of a kernel with some statements."""
    return f"def kernel({ARGUMENTS}):\n" + "".join(f"    {row}\n" for row in body.splitlines())


def plain(text: str) -> str:
    """Return a text without redundant parentheses."""
    return ast.unparse(ast.parse(text))


# Roles of lines by data flow: distances to a use, branches that decide, and values that are discarded.


TEXT = """def kernel(k, q, out, stride, cap, DIM):
    row = tl.program_id(0)
    at = row * stride
    place = k + at
    x = tl.load(place, mask=row < DIM)
    s = tl.sum(x * q)
    if cap > 0:
        s = cap * s
    w = tl.exp(s)
    tl.store(out + row, w)
"""


def test_lines_have_their_distance_to_a_load():
    found = roles(TEXT)["address"]
    assert {line: found[line] for line in (5, 4, 3, 2)} == {5: 0, 4: 1, 3: 2, 2: 3}
    assert slice_of(TEXT, 5)[3] == 2


def test_a_branch_that_decides_about_a_score_has_its_role():
    assert roles(TEXT)["score"][7] == 1
    assert 7 not in roles(TEXT)["address"]


def test_the_range_of_a_loop_has_what_feeds_it():
    text = "def kernel(n):\n    a = n\n    b = n\n    for i in range(0, a * 2):\n        c = a\n"
    assert slice_of(text, 4) == {4: 0, 2: 1}


def test_a_value_that_is_replaced_unused_is_found():
    assert overwriting(TEXT) == set()
    assert overwriting(TEXT.replace("w = tl.exp(s)", "w = tl.exp(s)\n    w = 0.0")) == {10}
    assert overwriting(TEXT.replace("s = cap * s", "s = cap * s\n        s = cap")) == {9}
