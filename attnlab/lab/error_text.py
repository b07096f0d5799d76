"""ErrorText: what the text of a failed test contains: counts, an index, dtypes, pytest ids."""

import math
import re
from dataclasses import dataclass

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase

_COUNT = re.compile(r"Mismatched elements:\s*(\d+)\s*/\s*(\d+)")
_NUMBER = r"(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|nan|inf)"
_TUPLE = r"\((\d{1,9}(?:,\s*\d{1,9})*)\)"
_GREATEST = re.compile(
    r"(?:Greatest|Max) absolute difference(?: among violations)?:"
    rf"\s*{_NUMBER}(?:\s+at index\s*{_TUPLE})?",
    re.I,
)
_RELATIVE = re.compile(rf"Greatest relative difference:\s*{_NUMBER}\s+at index\s*{_TUPLE}", re.I)
_TEST_ID = re.compile(r"test_\w+\[[^\[\]\s]+\]")
_INDEX = re.compile(r"\((\d{1,9}(?:,\s*\d{1,9}){2,3})\)")
_VALUE = r"(-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|-?nan|-?inf)"
_LISTED = re.compile(  # one mismatch in the list of pytest.approx or numpy.testing
    rf"[(\[](\d{{1,9}}(?:,\s*\d{{1,9}})+)[)\]](?:\s*\|\s*|:\s*){_VALUE}(?:\s*\|\s*| \(ACTUAL\), ){_VALUE}"
)
_NAMED_INDEX = re.compile(rf"\bindex\s*:?\s*{_TUPLE}", re.I)
_DTYPES = re.compile(r"expected scalar type (\w+) but found (\w+)")
_ALLCLOSE = re.compile(r"\ballclose\(|Not equal to tolerance|Arrays are not almost equal")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorText:
    """What the text of a failed test contains; None or "" for what it does not.

    - ``mismatched``, ``total``, ``greatest``: the numbers of ``torch.testing.assert_close``, of
      ``numpy.testing`` or of ``pytest.approx``, wherever they are in the text.
    - ``index``: the index of the greatest difference, or of the greatest in a list of mismatches; without
      these, the first that the text calls an index, or, in a text without these numbers, the first one.
    - ``dtypes``: the dtype that an op expects and the one that it found, in torch's C++ names.
    - ``has_allclose``: the text has a call of allclose, or is an assertion of ``numpy.testing``.
    - ``test_id``: the last pytest id that a Case can be made from.
    - ``refusal``: why the last id that names an attention test cannot be made a Case.
    """

    mismatched: int | None = None
    total: int | None = None
    greatest: float | None = None
    index: tuple[int, ...] | None = None
    dtypes: tuple[str, str] | None = None
    has_allclose: bool = False
    test_id: str | None = None
    refusal: str = ""

    @classmethod
    def read(cls, text: str) -> "ErrorText":
        """Return what a text contains."""
        count, greatest, dtypes = _COUNT.search(text), _GREATEST.search(text), _DTYPES.search(text)
        rest = _RELATIVE.sub("", text)
        named = _NAMED_INDEX.search(rest)
        if named is None and greatest is None and count is None:
            named = _INDEX.search(rest)
        place = greatest[2] if greatest and greatest[2] else named[1] if named else None
        largest = float(greatest[1]) if greatest else None
        listed = [(abs(float(a) - float(b)), at) for at, a, b in _LISTED.findall(text)]
        if listed and not (greatest and greatest[2]):
            largest, place = max(listed, key=lambda one: math.inf if math.isnan(one[0]) else one[0])
        test_id, refusal = _test_id(text)
        return cls(
            mismatched=int(count[1]) if count else None,
            total=int(count[2]) if count else None,
            greatest=largest,
            index=tuple(int(n) for n in place.split(",") if n.strip()) if place else None,
            dtypes=(dtypes[1], dtypes[2]) if dtypes else None,
            has_allclose=_ALLCLOSE.search(text) is not None,
            test_id=test_id,
            refusal=refusal,
        )


def _test_id(text: str) -> tuple[str | None, str]:
    """Return the last id that becomes a Case and "", or None and why the last id does not."""
    refusal = ""
    for test_id in reversed(list(dict.fromkeys(_TEST_ID.findall(text)))):
        try:
            Case.from_test_id(test_id)
        except InvalidCase as error:
            refusal = refusal or str(error)
        else:
            return str(test_id), ""
    return None, refusal
