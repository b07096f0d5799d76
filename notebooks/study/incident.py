"""The incident that the notebooks study, vLLM #28490: its public history and what a page says of it."""

from attnlab.reports.notebook_result import Event, PostMortem

TITLE = "vLLM #28490"
_REPOSITORY = "https://github.com/vllm-project/vllm"
URL = f"{_REPOSITORY}/issues/28490"

# By the day on which each thread was opened. #28424 is named in the text of #28490.
TIMELINE = (
    Event(
        name="PR #28424",
        date="by 2025-11-11",
        text="the test asks for int32 index tensors, before torch.cumsum",
        url=f"{_REPOSITORY}/pull/28424",
    ),
    Event(
        name="issue #28490",
        date="2025-11-11",
        text="test_prefix_prefill fails on AMD GPUs",
        url=URL,
    ),
    Event(
        name="PR #28905",
        date="2025-11-18",
        text="the cast moves after torch.cumsum and is merged; 160 tests pass",
        url=f"{_REPOSITORY}/pull/28905",
    ),
    Event(
        name="PR #29019",
        date="2025-11-19",
        text="a wider tolerance is proposed and closed",
        url=f"{_REPOSITORY}/pull/29019",
    ),
)


def post_mortem(*, related: tuple[Event, ...] = (), **fields: object) -> PostMortem:
    """Return a PostMortem of this incident.

    ``fields`` are those of PostMortem and replace its facts; ``related`` are events after those of the
    incident. Raises TypeError for an unknown field.
    """
    values: dict[str, object] = {
        "since": "the ROCm runs of the test on vLLM 0.11.2",
        "timeline": TIMELINE,
        "incident": TITLE,
        "url": URL,
        **fields,
    }
    values["timeline"] = (*values["timeline"], *related)  # type: ignore[misc]
    return PostMortem(**values)  # type: ignore[arg-type]


def pull_request(number: int, date: str, text: str) -> Event:
    """Return the event of a vLLM pull request, which was opened at ``date``."""
    return Event(name=f"PR #{number}", date=date, text=text, url=f"{_REPOSITORY}/pull/{number}")
