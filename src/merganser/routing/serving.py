"""An HTTP server for an adaptive model: /predict, /route, /healthz, /metrics, and /docs about them."""

# FastAPI reads the annotations of its routes, where `Request` is a local name, so they must not be strings.
import asyncio
import hmac
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch

from merganser.errors import InputError, MerganserError, first_line, require
from merganser.modules.inputs import Inputs
from merganser.plain import plain
from merganser.routing import documentation
from merganser.routing.adaptive import AdaptiveModel
from merganser.routing.batching import Answer, AnswerBatch, Batcher, Busy, Closed, Limits
from merganser.routing.choices import Routing
from merganser.routing.predictions import Prediction
from merganser.routing.requests import Encode, Refused, parse

#: Status for a client that disconnected before its body was read; nobody sees the answer.
GONE = 499
_log = logging.getLogger("merganser.serve")


class NotFinite(MerganserError):
    """The model's answer is NaN, so that no class can be determined."""


class _Metrics:
    """Counters in the text format of Prometheus."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: dict[str, float] = {}
        self.experts: Counter[str] = Counter()

    def count(self, path: str, status: int, seconds: float) -> None:
        self.requests[path, status] += 1
        self.seconds[path] = self.seconds.get(path, 0.0) + seconds

    def text(self, model: AdaptiveModel, batcher: Batcher) -> str:
        gauges = {
            "merganser_batches_total": batcher.batches,
            "merganser_samples_total": batcher.samples,
            "merganser_queued_samples": batcher.queued,
            "merganser_cache_hits_total": model.cache.hits,
            "merganser_cache_misses_total": model.cache.misses,
            "merganser_cache_bytes": model.cache.nbytes,
        }
        lines = [
            f'merganser_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        lines += [f'merganser_request_seconds_sum{{path="{p}"}} {s:.6f}' for p, s in sorted(self.seconds.items())]
        lines += [f'merganser_expert_chosen_total{{expert="{e}"}} {n}' for e, n in sorted(self.experts.items())]
        lines += [f"{name} {value}" for name, value in gauges.items()]
        return "\n".join(lines) + "\n"


class _Server:
    """A model, its queue, and its metrics."""

    def __init__(
        self,
        model: AdaptiveModel,
        encode: Encode | None,
        limits: Limits,
        token: str | None,
    ) -> None:
        self.model, self.encode, self.limits = model, encode, limits
        self._token = None if token is None else _check_token(token)
        self._disconnected = require("starlette.requests", "serve").ClientDisconnect
        # One thread, since the user's function may not be thread-safe, and outside the event loop.
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="merganser-parse")
        self.metrics = _Metrics()
        works: dict[str, AnswerBatch] = {"predict": _predicting(model), "route": _routing(model)}
        # A model that routes per batch would give requests of different clients one set and one head.
        self.batcher = Batcher(works, limits, together=not model.settings.per_batch)

    @asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        self.model.prepare()
        self.batcher.start()
        yield
        await self.batcher.stop()
        self._parsing.shutdown(wait=True)

    def admits(self, request: Any) -> bool:
        """Return whether a request has the token, if one is required."""
        if self._token is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token)

    async def answer(self, request: Any, work: str, key: str) -> tuple[int, Answer]:
        """Return status and content of an answer: the result of `work` under `key`, or an error."""
        began = time.perf_counter()
        try:
            if not self.admits(request):
                raise Refused(401, "the request has no valid token: send it as `Authorization: Bearer TOKEN`")
            body = await _body(request, self.limits)
            given = (body, self.model.module, self.encode, self.limits)
            inputs = await asyncio.get_running_loop().run_in_executor(self._parsing, parse, *given)
            answers = await self.batcher.submit(work, inputs)
            self.metrics.experts.update(name for found in answers for name in found["experts"])
            status, content = 200, {key: plain(list(answers))}
        except Refused as refused:
            status, content = refused.status, {"error": refused.message}
        except InputError as error:
            status, content = 422, {"error": str(error)}
        except (Busy, Closed) as error:
            status, content = 503, {"error": str(error)}
        except (TimeoutError, asyncio.TimeoutError):
            status, content = 504, {"error": f"no answer within {self.limits.timeout:g} seconds"}
        except self._disconnected:
            status, content = GONE, {"error": "the client disconnected"}
        except asyncio.CancelledError:  # the shutdown period is over
            status, content = 503, {"error": "the server is stopping"}
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            # Errors that a module raises for arrays of an unknown shape, type or vocabulary.
            status, content = 422, {"error": f"the model does not accept these inputs: {first_line(error)}"}
        except NotFinite as error:
            status, content = 500, {"error": str(error)}
        except Exception as error:
            _log.exception("a request failed")
            status, content = 500, {"error": f"the request failed: {type(error).__name__}: {first_line(error)}"}
        self.metrics.count(f"/{work}", status, time.perf_counter() - began)
        return status, content

    def health(self, request: Any) -> tuple[int, Answer]:
        """Return status and health of the server; details only for authorised requests."""
        stopping = self.batcher.closed
        content: Answer = {"status": "stopping" if stopping else "ok"}
        if self.admits(request):
            content["experts"] = list(self.model.library.experts)
        return (503 if stopping else 200), content


def create_app(
    model: AdaptiveModel,
    *,
    encode: Encode | None = None,
    limits: Limits | None = None,
    token: str | None = None,
) -> Any:
    """Return a FastAPI application that serves a model.

    A request is `{"inputs": …}`: the module's keyword arguments as an object of arrays, or a single array, samples
    first, or whatever `encode` takes. Requests that arrive together are computed together, unless the model routes per
    batch: then each request is a batch. Run the application with `create_server`, which also limits connections and the
    time for headers.

    Args:
        model: The adaptive model.
        encode: Turns the inputs of a request, for example texts, into the module's arguments.
        limits: Sizes, numbers and times that the server allows.
        token: If given, every path but `/healthz` requires `Authorization: Bearer TOKEN`.

    Returns:
        A `fastapi.FastAPI` application.

    Raises:
        InputError: If the token cannot be sent in a header.

    Example:
        >>> app = mg.routing.create_app(mg.routing.AdaptiveModel(encoder, library, heads))
    """
    fastapi = require("fastapi", "serve")
    responses = require("fastapi.responses", "serve")
    Request = fastapi.Request
    server = _Server(model, encode, limits or Limits(), token)
    # FastAPI's own pages load scripts from another server; with a token nothing describes the API.
    pages: dict[str, Any] = {"docs_url": None, "redoc_url": None, **({} if token is None else {"openapi_url": None})}
    app = fastapi.FastAPI(title="merganser", lifespan=server.lifespan, **pages)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}

    def json(status: int, content: Answer) -> Any:
        return responses.JSONResponse(content, 400 if status == GONE else status, headers.get(status))

    async def predict(request: Request) -> Any:  # type: ignore[valid-type]
        """Return task, class and score of every sample."""
        return json(*await server.answer(request, "predict", "predictions"))

    async def route(request: Request) -> Any:  # type: ignore[valid-type]
        """Return the experts of every sample, without the second pass."""
        return json(*await server.answer(request, "route", "routes"))

    async def healthz(request: Request) -> Any:  # type: ignore[valid-type]
        """Return whether the server answers, and the names of its experts."""
        return json(*server.health(request))

    async def metrics(request: Request) -> Any:  # type: ignore[valid-type]
        """Return counts of requests, batches and experts, and the state of the cache."""
        if not server.admits(request):
            return json(401, {"error": "the request has no valid token"})
        text = server.metrics.text(model, server.batcher)
        return responses.PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def refused(_: Any, error: Any) -> Any:
        return responses.JSONResponse({"error": error.detail}, error.status_code, error.headers)

    async def docs() -> Any:
        return responses.HTMLResponse(documentation.render(app.openapi()))

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = type(app).openapi(app)
            found.setdefault("components", {}).setdefault("schemas", {}).update(documentation.SCHEMAS)
        return app.openapi_schema  # type: ignore[no-any-return]

    app.openapi = openapi
    app.add_exception_handler(404, refused)
    app.add_exception_handler(405, refused)
    app.add_api_route("/predict", predict, **documentation.describe_work("predictions", "Prediction"))
    app.add_api_route("/route", route, **documentation.describe_work("routes", "Route"))
    app.add_api_route("/healthz", healthz, **documentation.describe_health())
    app.add_api_route("/metrics", metrics, **documentation.describe_metrics())
    if token is None:
        app.add_api_route("/docs", docs, include_in_schema=False)
    return app


async def _body(request: Any, limits: Limits) -> bytes:
    """Read the request body, up to the size limit."""
    declared = request.headers.get("content-length", "0")
    too_large = Refused(413, f"the body is larger than {limits.body_bytes} bytes")
    if declared.isdigit() and int(declared) > limits.body_bytes:
        raise too_large
    parts = bytearray()

    async def read() -> bytes:
        async for chunk in request.stream():
            parts.extend(chunk)
            if len(parts) > limits.body_bytes:
                raise too_large
        return bytes(parts)

    try:
        return await asyncio.wait_for(read(), limits.timeout)
    except (TimeoutError, asyncio.TimeoutError):
        raise Refused(408, f"the body did not arrive within {limits.timeout:g} seconds") from None


def _predicting(model: AdaptiveModel) -> Callable[[Inputs], list[Answer]]:
    def run(inputs: Inputs) -> list[Answer]:
        if model.heads is None:
            found: Prediction = model(inputs)
            features = model.features(found.output, inputs)
            _check_numbers(features)
            rows = features.tolist()
            return [_routed(found.routing, i) | {"output": row} for i, row in enumerate(rows)]
        found = model.predict(inputs)
        classes, scores = found.classes, found.scores
        _check_numbers(scores)
        answers = []
        for i, (task, chosen) in enumerate(zip(found.tasks, found.sets, strict=True)):
            label, score = int(classes[i]), float(scores[i])
            answer: Answer = {"task": task, "class": label, "score": score}
            if names := model.heads.names(task):
                answer["label"] = names[label]
            answers.append(answer | {"experts": [name for name in model.library.experts if name in chosen]})
        return answers

    return run


def _routing(model: AdaptiveModel) -> Callable[[Inputs], list[Answer]]:
    def run(inputs: Inputs) -> list[Answer]:
        routing = model.route(inputs)
        _check_numbers(routing.weights)
        return [_routed(routing, sample) for sample in range(inputs.size)]

    return run


def _check_numbers(answers: torch.Tensor) -> None:
    """Refuse NaN, which a sort would treat as the largest number."""
    bad = answers.isnan().reshape(len(answers), -1).any(1).nonzero().flatten().tolist()
    if bad:
        raise NotFinite(
            f"the model's answer for sample {bad[0]} is not a number (NaN): check the weights of its experts and heads"
        )


def _check_token(token: str) -> bytes:
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError("the token must be printable ASCII without spaces, and not empty")
    return token.encode()


def _routed(routing: Routing, sample: int) -> Answer:
    weights = dict(zip(routing.tasks, routing.weights[sample].tolist(), strict=True))
    chosen = [task for task in routing.tasks if task in routing.sets[sample]]
    return {"experts": chosen, "weights": weights, "fallback": bool(routing.fallback[sample])}
