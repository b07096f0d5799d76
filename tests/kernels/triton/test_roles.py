"""Roles of lines by data flow: distances to a use, branches that decide, and values that are discarded."""

from attnlab.kernels.triton.kernel_text import overwriting, roles, slice_of

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


def test_a_value_that_is_replaced_unused_is_found():
    assert overwriting(TEXT) == set()
    assert overwriting(TEXT.replace("w = tl.exp(s)", "w = tl.exp(s)\n    w = 0.0")) == {10}
    assert overwriting(TEXT.replace("s = cap * s", "s = cap * s\n        s = cap")) == {9}
