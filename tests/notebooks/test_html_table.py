"""Tables of a notebook: text at the left, numbers at the right."""

from study.html_table import table


def test_sides_of_columns():
    found = table("name", "count", "text", rows=[("a", 1.25, "1 of 2"), ("b", "7e-06", "none")])
    sides = [cell.partition(";")[0] for cell in found._repr_html_().split("text-align: ")[1:]]
    assert [side.partition('"')[0] for side in sides] == ["left", "right", "left"] * 3
    assert repr(found).splitlines()[1].split() == ["a", "1.25", "1", "of", "2"]
