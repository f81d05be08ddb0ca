"""The bodies of requests, and their limits."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_CHARACTERS = 20_000  # of a text
MAX_MASKS = 20_000
MAX_CHANGES = 512
MAX_FILE_TRACES = 32
MAX_FILE_BYTES = 2**28  # of the arrays of its traces, as stored
MAX_POSITIONS, MAX_FEATURES = 512, 512


class RequestModel(BaseModel):
    """A request; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, strict=True)


class RunRequest(RequestModel):
    """A request about a run, or a snapshot of it, and an input text."""

    run: str
    step: int | None = None
    weights: str | None = None  # fingerprint from an earlier answer; refused if the weights have changed since
    text: str
    target: str | None = None

    @field_validator("text", "target")
    @classmethod
    def _unicode(cls, text: str | None) -> str | None:
        if text is not None and any("\ud800" <= char <= "\udfff" for char in text):
            raise ValueError("the text is not valid Unicode")
        return text


class TraceBody(RunRequest):
    after: list[int] | None = Field(None, alias="continue", max_length=4096)
    changes: list[dict[str, Any]] = Field(default_factory=list, max_length=MAX_CHANGES)


class ExplainBody(RunRequest):
    masks: int = 1000
    keep: float = 0.5
    seed: int = 0
    unit: Literal["words", "tokens"] = "words"
    how: Literal["unknown", "drop"] = "unknown"
    span: int = 1
    exact: bool | None = None

    @field_validator("keep", mode="before")
    @classmethod
    def _number(cls, keep: Any) -> Any:
        return float(keep) if isinstance(keep, int) and not isinstance(keep, bool) else keep


class StandaloneBody(RequestModel):
    requests: list[TraceBody] = Field(min_length=1, max_length=MAX_FILE_TRACES)
    hash: str = Field("", max_length=10_000)


class PositionsBody(RequestModel):
    kind: Literal["sinusoidal", "sinusoidal-split", "learned", "index", "fraction"]
    length: int = Field(64, ge=2, le=MAX_POSITIONS)
    width: int = Field(64, ge=2, le=MAX_FEATURES)
    base: float = Field(10_000.0, gt=1.0, le=1e9, strict=False)
    run: str | None = None  # a run whose learned positions are studied
    step: int | None = None
    weights: str | None = None
