"""The post-mortem of a notebook as data: its page shows the summary on top and the follow-up at the end."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from attnlab.case.errors import AttnLabError, InvalidCase

POST_MORTEM_MIME = "application/vnd.attnlab.post-mortem+json"
OWNERS = ("kernel", "test", "upstream")
SUMMARY = ("failed", "where", "since", "cause", "fix", "status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Hold one entry of a timeline: a name such as "PR #28905", what happened, and a link or ""."""

    name: str
    text: str
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostMortem:
    """Summarize an incident for the people who own the kernel, the test and the upstream project.

    - ``failed``: what failed; ``where``: platforms and releases; ``since``: from when on.
    - ``cause``: one sentence; ``fix``: what removes the cause; ``status``: what is merged and what is open.
    - ``impact``: one text for each consequence; ``timeline``: events in their order.
    - ``follow_up``: action items by owner; the owners are OWNERS.
    - ``incident``, ``url``: name and address of the incident.

    Raises InvalidCase if a text of the summary is empty or an owner is unknown.
    """

    failed: str
    where: str
    since: str
    cause: str
    fix: str
    status: str
    impact: tuple[str, ...] = ()
    timeline: tuple[Event, ...] = ()
    follow_up: Mapping[str, str] = field(default_factory=dict)
    incident: str = ""
    url: str = ""

    def __post_init__(self) -> None:
        for name in SUMMARY:
            if not getattr(self, name).strip():
                raise InvalidCase(f"{name} must be a text, got an empty one", field=name)
        for owner in self.follow_up:
            if owner not in OWNERS:
                allowed = ", ".join(OWNERS)
                raise InvalidCase(
                    f"follow_up must name owners of {allowed}, got {owner!r}", field="follow_up"
                )

    @property
    def summary(self) -> dict[str, str]:
        """Return the rows of the summary box, by their labels."""
        return {_LABELS[name]: getattr(self, name) for name in SUMMARY}

    def to_json(self) -> dict[str, Any]:
        """Return the post-mortem as plain JSON values; from_json reads them back."""
        return {**asdict(self), "impact": [*self.impact], "timeline": [*map(asdict, self.timeline)]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PostMortem":
        """Return the post-mortem that to_json wrote. Raises AttnLabError if it has another form."""
        try:
            events = tuple(Event(**event) for event in data["timeline"])
            return cls(**{**data, "impact": tuple(data["impact"]), "timeline": events})
        except (KeyError, TypeError) as error:
            raise AttnLabError(f"post-mortem must have the fields of one, got {error}") from error

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            "text/plain": "\n".join(f"{label}: {text}" for label, text in self.rows()),
            "text/html": _table(self.rows()),
            POST_MORTEM_MIME: self.to_json(),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the whole post-mortem as (label, text), in the order of reading."""
        rows = [*self.summary.items()]
        rows += [("Impact", text) for text in self.impact]
        rows += [(f"Follow-up: {owner}", text) for owner, text in self.follow_up.items()]
        return rows


_LABELS = {
    "failed": "What failed",
    "where": "Where",
    "since": "Since",
    "cause": "Cause",
    "fix": "Fix",
    "status": "Status",
}


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th style="text-align:left;vertical-align:top">{escape(label)}</th>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for label, text in rows
    )
    return f'<table class="attnlab-post-mortem"><tbody>{cells}</tbody></table>'
