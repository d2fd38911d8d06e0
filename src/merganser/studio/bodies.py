"""The bodies of requests to the API."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class RecipeBody(BaseModel):
    """A recipe as text or as a document, and the directory that its relative paths refer to."""

    text: str | None = None
    document: dict[str, Any] | None = None
    beside: str | None = None


class SaveBody(BaseModel):
    """A recipe to write to a file."""

    path: str
    text: str
    overwrite: bool = False


class JobValues(BaseModel):
    """The values that commands of jobs are built from; each kind of job takes some of them."""

    path: str | None = None
    text: str | None = None
    out: str | None = None
    beside: str | None = None
    base: str | None = None
    experts: dict[str, str] | list[str] | None = None
    parents: list[str] | None = None
    trial: str | None = None
    budget: int | None = None
    all: bool | None = None
    overwrite: bool | None = None


class JobBody(BaseModel):
    """A job to start: its kind, and the values for its command."""

    kind: str
    values: JobValues = Field(default_factory=JobValues)


class PromptBody(BaseModel):
    """A prompt; see `player.Prompt`."""

    text: str = Field(max_length=100_000)
    tokens: int = Field(48, ge=1, le=1024)
    temperature: float = Field(0.0, ge=0, le=5)
    seed: int = 0
    chat: bool = False


class QuestionsBody(BaseModel):
    """A file of questions; see `questions.Questions`."""

    path: str
    kind: str | None = None
    limit: int = Field(64, ge=1, le=10_000)


class VerdictBody(BaseModel):
    """Answers of two models to the same questions, in the same order."""

    left: list[float] = Field(max_length=10_000)
    right: list[float] = Field(max_length=10_000)
    lower_is_better: bool = False


class PlayBody(BaseModel):
    """Recipes to play one after the other; see `Player.play`. `builtin` scores the built-in texts."""

    documents: list[dict[str, Any]] = Field(min_length=1, max_length=400)
    prompt: PromptBody | None = None
    texts: list[str] = Field(default_factory=list)
    builtin: bool = False
    compare: bool = False
    questions: QuestionsBody | None = None


class OverlapBody(BaseModel):
    """A base, its experts by name, and the matrix to show."""

    base: str
    experts: dict[str, str]
    matrix: str


class RouteBody(BaseModel):
    """A library and a sentence."""

    path: str
    text: str = Field(min_length=1, max_length=10_000)
