"""What can be asked of the server, field by field, and how much of it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

CHARACTERS = 20_000  # of a text
MASKS = 20_000
CHANGES = 512
REQUESTS = 32  # traces in one file
FILE_BYTES = 2**28  # of their arrays, as they are carried
LONGEST, WIDEST = 512, 512  # of a position table


class RequestModel(BaseModel):
    """A request; a field that is not known is a mistake."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, strict=True)


class RunRequest(RequestModel):
    """About a run, or a snapshot of it, and a text that it reads."""

    run: str
    step: int | None = None
    weights: str | None = None  # as an earlier answer named them: refused where there are others by now
    text: str
    target: str | None = None

    @field_validator("text", "target")
    @classmethod
    def _unicode(cls, text: str | None) -> str | None:
        if text is not None and any("\ud800" <= sign <= "\udfff" for sign in text):
            raise ValueError("the text is not valid Unicode")
        return text


class TraceBody(RunRequest):
    after: list[int] | None = Field(None, alias="continue", max_length=4096)
    changes: list[dict[str, Any]] = Field(default_factory=list, max_length=CHANGES)


class ExplainBody(RunRequest):
    masks: int = 1000
    keep: float = 0.5
    seed: int = 0
    unit: Literal["words", "pieces"] = "words"
    how: Literal["unknown", "drop"] = "unknown"
    span: int = 1
    exact: bool | None = None

    @field_validator("keep", mode="before")
    @classmethod
    def _number(cls, keep: Any) -> Any:
        return float(keep) if isinstance(keep, int) and not isinstance(keep, bool) else keep


class StandaloneBody(RequestModel):
    requests: list[TraceBody] = Field(min_length=1, max_length=REQUESTS)
    hash: str = Field("", max_length=10_000)


class PositionsBody(RequestModel):
    kind: Literal["sinusoidal", "sinusoidal-split", "learned", "index", "fraction"]
    length: int = Field(64, ge=2, le=LONGEST)
    width: int = Field(64, ge=2, le=WIDEST)
    base: float = Field(10_000.0, gt=1.0, le=1e9, strict=False)
    run: str | None = None  # its own table, of learned positions
    step: int | None = None
    weights: str | None = None
