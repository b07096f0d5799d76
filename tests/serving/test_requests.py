"""Prefixes: the same tokens give the same hash, however they arrive."""

import numpy as np
import pytest
from helpers.fake_vllm import new_request, scheduled

from attnlab.serving.batch import Request, Requests

TOKENS = np.random.default_rng(0).integers(0, 50_000, 300)


def of_tokens(*parts: np.ndarray) -> Request:
    one, first = Request("a", 1), 0
    for part in parts:
        one.set_tokens(first, part)
        first += len(part)
    return one


@pytest.mark.parametrize("cut", [1, 64, 299])
def test_chunks_make_no_difference(cut):
    whole, cut_up = of_tokens(TOKENS), of_tokens(TOKENS[:cut], TOKENS[cut:])
    assert np.array_equal(whole.prefixes, cut_up.prefixes)
    assert len(set(whole.prefixes.tolist())) == len(TOKENS)


def test_a_prefix_depends_on_each_token_before_it_and_on_no_later_one():
    other = TOKENS.copy()
    other[100] += 1
    same = of_tokens(TOKENS).prefixes == of_tokens(other).prefixes
    assert same[:100].all()
    assert not same[100:].any()


def test_the_order_of_tokens_counts():
    swapped = TOKENS.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert of_tokens(TOKENS).prefixes[-1] != of_tokens(swapped).prefixes[-1]


def test_images_with_the_same_placeholders_differ():
    ones = [Request("a", 1), Request("b", 2), Request("c", 3)]
    for one, content in zip(ones, ("cat", "dog", "cat"), strict=True):
        one.mark(10, 20, content)
        one.set_tokens(0, TOKENS)
    cat, dog, again = (one.prefixes for one in ones)
    assert np.array_equal(cat[:10], dog[:10])
    assert cat[10] != dog[10]
    assert np.array_equal(cat, again)


def test_rejected_draft_tokens_are_replaced():
    one = of_tokens(TOKENS[:10], np.array([1, 2, 3]))
    one.set_tokens(10, TOKENS[10:12])
    assert one.length == 12
    assert np.array_equal(one.prefixes, of_tokens(TOKENS[:12]).prefixes)


def test_tokens_of_the_prompt_are_kept():
    one = Request("a", 1)
    one.set_prompt(TOKENS[:10])
    one.set_tokens(8, np.array([0, 0, 7]))  # a runner may have other ids where an image is
    assert one.length == 11
    assert np.array_equal(one.prefixes, of_tokens(TOKENS[:10], np.array([7])).prefixes)


def test_a_gap_makes_the_tokens_unknown():
    one = of_tokens(TOKENS[:10])
    one.set_tokens(12, TOKENS[12:])
    assert not one.has_tokens


def test_requests_follow_the_scheduler():
    requests = Requests()
    requests.update(scheduled({"a": 3}, scheduled_new_reqs=[new_request("a", [1, 2, 3])]))
    first = requests["a"]
    assert (first.is_running, first.prompt_len) == (True, 3)
    requests.update(scheduled({}, preempted_req_ids={"a"}))
    assert not first.is_running
    requests.update(scheduled({"a": 1}))
    assert first.is_running
    requests.update(scheduled({}, finished_req_ids={"a"}))
    assert not first.is_running
    assert "a" not in requests
    requests.update(scheduled({"late": 1}))  # its prompt was never seen
    assert not requests["late"].has_tokens
    assert requests.of_number(first.number) is first
    requests.forget_except([])
    assert first not in list(requests)
