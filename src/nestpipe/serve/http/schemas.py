"""The bodies of requests and answers, as JSON, as headers of binary bodies, and for OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from nestpipe.serve.settings import MOST_DEADLINE_S, HttpSettings, ServeSettings
from nestpipe.serve.types import Outcome, Path

LARGEST = 2**63 - 1

Whole = Annotated[int, Field(ge=-LARGEST - 1, le=LARGEST)]
Wholes = Annotated[list[Whole], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=2**31)]
User = Annotated[str, Field(min_length=1, max_length=256, examples=["u42"])]
Deadline = Annotated[
    float, Field(gt=0, le=MOST_DEADLINE_S * 1000, allow_inf_nan=False, examples=[50])
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class HistoryBody(_Body):
    """Events of a user, oldest first."""

    items: Wholes
    times: Wholes | None = None
    """As many as items; needed where the model reads times."""


class PrefetchBody(_Body):
    """A user whose ranking is about to come."""

    user: User
    history: HistoryBody | None = None
    """May be left out where the service has a file of histories."""


class RankBody(_Body):
    """Candidates to score."""

    user: User
    long: HistoryBody | None = None
    """The history that was (or could have been) given to /v1/prefetch."""
    short: HistoryBody | None = None
    """Events after it."""
    candidates: Wholes
    time: Whole | None = None
    """When it is asked; needed where the model reads times."""
    deadline_ms: Deadline | None = None
    """After so long an answer is worth nothing: 504."""


class HistoryCounts(_Body):
    """A history in the header of a binary body."""

    items: Count
    times: Count | None = None


class PrefetchHeader(_Body):
    """A signal in the header of a binary body."""

    user: User
    history: HistoryCounts | None = None


class RankHeader(_Body):
    """A ranking in the header of a binary body."""

    user: User
    long: HistoryCounts | None = None
    short: HistoryCounts | None = None
    candidates: Count
    time: Whole | None = None
    deadline_ms: Deadline | None = None


class ReloadBody(_Body):
    """Another checkpoint to serve."""

    checkpoint: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """A folder on the machine of the service; left out: the latest of the folder it began with."""


class PrefetchAnswer(BaseModel):
    """What the trigger decided."""

    outcome: Outcome


class RankAnswer(BaseModel):
    """Scores in the order of the candidates, and how they came about."""

    scores: list[float]
    path: Path
    length_used: int
    """Events that the scores rest on."""
    version: str
    stages_ms: dict[str, float]


class HealthAnswer(BaseModel):
    """Whether to send requests."""

    ready: bool
    draining: bool
    version: str | None = None
    """Not told to callers without the token."""


class ReloadAnswer(BaseModel):
    """What is served now."""

    version: str


class ErrorAnswer(BaseModel):
    """One sentence: what, which value, what to do."""

    error: str


REQUESTS = (PrefetchBody, RankBody, ReloadBody)


def request_schemas(settings: ServeSettings, http: HttpSettings, histories: bool) -> dict[str, Any]:
    """The bodies for OpenAPI, with the limits of this very service.

    `histories`: it has some itself, so that requests may leave theirs out.
    """
    _, found = models_json_schema(
        [(model, "validation") for model in REQUESTS], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = found["$defs"]
    items = schemas["HistoryBody"]["properties"]["items"]
    candidates = schemas["RankBody"]["properties"]["candidates"]
    items["maxItems"] = settings.most_events
    candidates |= {"minItems": 1, "maxItems": settings.most_candidates}
    if not http.negative_ids:
        items["items"]["minimum"] = candidates["items"]["minimum"] = 0
    if not histories:
        for body, name in (("PrefetchBody", "history"), ("RankBody", "long")):
            schemas[body]["required"].append(name)
            schemas[body]["properties"][name] = {"$ref": "#/components/schemas/HistoryBody"}
    return schemas
