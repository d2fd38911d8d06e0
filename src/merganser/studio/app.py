"""The application: the page, and the API behind it."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from merganser.errors import InputError, MerganserError, require
from merganser.plain import plain
from merganser.recipes import recipe_schema  # here, not in handlers: first requests would race to import the package
from merganser.studio import results, views
from merganser.studio.bodies import JobBody, OverlapBody, PlayBody, RecipeBody, RouteBody, SaveBody, VerdictBody
from merganser.studio.commands import build_command
from merganser.studio.discovery import discover
from merganser.studio.families import find_family
from merganser.studio.gate import Gate
from merganser.studio.jobs import Jobs
from merganser.studio.machine import describe_machine
from merganser.studio.player import Player, Prompt
from merganser.studio.questions import Questions, compare_answers
from merganser.studio.roots import Outside, Roots
from merganser.studio.streaming import async_lines, lines, watch

STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Studio:
    """The handlers of the API. Paths are in the form of `Roots.show`; problems are raised as `MerganserError`."""

    def __init__(self, roots: Roots, state: Path, device: str) -> None:
        self._roots = roots
        self._jobs = Jobs(state / "jobs")
        self._player = Player(roots, device)
        self._routes = results.Routes(roots)
        self._responses = require("fastapi.responses", "studio")

    def routes(self) -> list[tuple[str, str, Callable[..., Any]]]:
        """Return method, path and handler of everything that can be asked."""
        return [
            ("GET", "/api/home", self.home),
            ("GET", "/api/family", self.family),
            ("GET", "/api/checkpoint", self.checkpoint),
            ("GET", "/api/difference", self.difference),
            ("GET", "/api/methods", views.show_methods),
            ("GET", "/api/schema", recipe_schema),
            ("GET", "/api/recipe", self.open_recipe),
            ("POST", "/api/recipe", self.check_recipe),
            ("POST", "/api/recipe/save", self.save_recipe),
            ("GET", "/api/jobs", self.list_jobs),
            ("POST", "/api/jobs", self.start_job),
            ("GET", "/api/jobs/watch", self.watch_jobs),
            ("GET", "/api/jobs/{name}", self.show_job),
            ("DELETE", "/api/jobs/{name}", self.remove_job),
            ("GET", "/api/jobs/{name}/result", self._jobs.result),
            ("POST", "/api/jobs/{name}/cancel", self._jobs.cancel),
            ("POST", "/api/jobs/{name}/resume", self._jobs.resume),
            ("POST", "/api/play", self.play),
            ("DELETE", "/api/play", self.free),
            ("POST", "/api/verdict", self.verdict),
            ("POST", "/api/overlap", self.overlap),
            ("GET", "/api/study", self.study),
            ("GET", "/api/study/watch", self.watch_study),
            ("GET", "/api/library", self.library),
            ("GET", "/api/library/budgets", self.budgets),
            ("POST", "/api/route", self.route),
            ("GET", "/{name:path}", self.page),
        ]

    def home(self) -> Any:
        items = [asdict(item) for item in discover(self._roots)]
        machine, live = describe_machine(self._roots.home), self._player.describe()
        jobs = self._jobs.list(8)
        return {"root": str(self._roots.home), "items": items, "jobs": jobs, "machine": machine, "live": live}

    def family(self) -> Any:
        return find_family(self._roots, discover(self._roots))

    def checkpoint(self, path: str) -> Any:
        return views.show_checkpoint(self._roots, path)

    def difference(self, first: str, second: str) -> Any:
        return self._stream(views.compare_checkpoints(self._roots, first, second))

    def open_recipe(self, path: str) -> Any:
        file = self._roots.find(path)
        beside = self._roots.show(file.parent)
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from None
        except UnicodeDecodeError:
            raise InputError(f"{path}: this is not UTF-8 text") from None
        return views.read_recipe(self._roots, text, beside) | {"beside": beside}

    def check_recipe(self, body: RecipeBody) -> Any:
        written = body.text if body.text is not None else body.document or {}
        return views.read_recipe(self._roots, written, body.beside)

    def save_recipe(self, body: SaveBody) -> Any:
        return {"path": views.save_recipe(self._roots, body.path, body.text, body.overwrite)}

    def list_jobs(self) -> Any:
        return self._jobs.list()

    async def watch_jobs(self) -> Any:
        return self._stream(watch(lambda: {"jobs": self._jobs.list()}, ignore="seconds"))

    def start_job(self, body: JobBody) -> Any:
        return self._jobs.start(build_command(self._roots, body.kind, body.values.model_dump(exclude_none=True)))

    def show_job(self, name: str) -> Any:
        return self._jobs.output(name)

    def remove_job(self, name: str) -> Any:
        self._jobs.remove(name)
        return {}

    def play(self, body: PlayBody) -> Any:
        from merganser.evaluate.texts import TEXTS

        prompt = Prompt(**body.prompt.model_dump()) if body.prompt else None
        texts = [*body.texts, *(TEXTS if body.builtin else ())]
        asked = body.questions
        questions = Questions(self._roots.find(asked.path), asked.kind, asked.limit) if asked else None
        return self._stream(self._player.play(body.documents, prompt, texts, body.compare, questions))

    def free(self) -> Any:
        self._player.free()
        return self._player.describe()

    def verdict(self, body: VerdictBody) -> Any:
        return compare_answers(body.left, body.right, body.lower_is_better)

    def overlap(self, body: OverlapBody) -> Any:
        return results.show_overlap(self._roots, body.base, body.experts, body.matrix)

    def study(self, path: str) -> Any:
        return results.show_study(self._roots, path)

    async def watch_study(self, path: str) -> Any:
        return self._stream(watch(lambda: results.show_study(self._roots, path), every=2.0, ignore="seconds_left"))

    def library(self, path: str) -> Any:
        return results.show_library(self._roots, path)

    def budgets(self, path: str) -> Any:
        return results.show_budgets(self._roots, path)

    def route(self, body: RouteBody) -> Any:
        return self._routes.route(body.path, body.text)

    def page(self, name: str) -> Any:
        file = STATIC / (name or "index.html")
        if file.parent != STATIC or not file.is_file():
            return self._responses.JSONResponse({"error": f"no such page: /{name}"}, 404)
        return self._responses.FileResponse(file, media_type=_TYPES[file.suffix], headers={"cache-control": "no-cache"})

    def _stream(self, events: Iterator[Mapping[str, Any]] | AsyncIterator[Mapping[str, Any]]) -> Any:
        content = async_lines(events) if isinstance(events, AsyncIterator) else lines(events)
        return self._responses.StreamingResponse(content, media_type="text/event-stream")


def create_app(roots: Sequence[str | os.PathLike[str]], state: Path, token: str, device: str = "cpu") -> Gate:
    """Return the studio as an ASGI application.

    Args:
        roots: The directories it may look at; the first is the one it opens on.
        state: Where jobs are kept.
        token: What requests to the API must carry.
        device: Where the model in memory computes.

    Raises:
        MissingExtraError: If FastAPI is not installed.

    Example:
        >>> app = create_app(["models"], Path("models/.merganser"), token="secret")
    """
    fastapi = require("fastapi", "studio")
    exceptions = require("fastapi.exceptions", "studio")
    responses = require("fastapi.responses", "studio")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # requests of the page must not reach the network

    class PlainResponse(responses.JSONResponse):  # type: ignore[misc, name-defined]
        """JSON with null in place of NaN and infinity."""

        def render(self, content: Any) -> bytes:
            return json.dumps(plain(content), allow_nan=False).encode()

    closed: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = fastapi.FastAPI(title="merganser studio", default_response_class=PlainResponse, **closed)

    def refuse(status: int) -> Callable[[Any, Exception], Any]:
        return lambda _, error: responses.JSONResponse({"error": str(error)}, status)

    def refuse_body(_: Any, error: Any) -> Any:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:]))
        return responses.JSONResponse({"error": f"{place}: {first['msg']}"}, 422)

    app.add_exception_handler(Outside, refuse(403))
    app.add_exception_handler(MerganserError, refuse(422))
    app.add_exception_handler(exceptions.RequestValidationError, refuse_body)
    for method, path, handler in Studio(Roots(roots), state, device).routes():
        app.add_api_route(path, handler, methods=[method], response_model=None)
    return Gate(app, token)
