"""The description of the served API: OpenAPI bodies, and a page about them that needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

_EXPERTS = {"type": "array", "items": {"type": "string"}, "description": "The experts that were merged for the sample."}
_ARRAY = {"type": "array", "description": "One entry per sample along the first axis.", "items": {}}

#: The schemas of requests and answers, by name.
SCHEMAS: dict[str, dict[str, Any]] = {
    "Request": {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {
            "inputs": {
                "description": "The module's keyword arguments by name, or a single array, samples along the first "
                "axis; a server with an encoder takes what that takes, such as a list of texts.",
                "anyOf": [{"type": "object", "additionalProperties": _ARRAY}, _ARRAY],
            }
        },
        "example": {"inputs": [[0.1, 0.2, 0.3]]},
    },
    "Route": {
        "type": "object",
        "required": ["experts", "weights", "fallback"],
        "properties": {
            "experts": _EXPERTS,
            "weights": {"type": "object", "additionalProperties": {"type": "number"}, "description": "By expert."},
            "fallback": {"type": "boolean", "description": "Whether no expert reached the threshold."},
        },
    },
    "Prediction": {
        "type": "object",
        "required": ["experts"],
        "properties": {
            "experts": _EXPERTS,
            "task": {"type": "string", "description": "The task whose head answered; with heads."},
            "class": {"type": "integer", "description": "The predicted class; with heads."},
            "score": {"type": ["number", "null"], "description": "Its score; with heads."},
            "label": {"type": "string", "description": "The name of the class, if the server knows it."},
            "output": {"type": "array", "items": {}, "description": "The model's features; without heads."},
            "weights": {"type": "object", "additionalProperties": {"type": "number"}, "description": "Without heads."},
            "fallback": {"type": "boolean", "description": "Without heads."},
        },
    },
    "Health": {
        "type": "object",
        "required": ["status"],
        "properties": {
            "status": {"enum": ["ok", "stopping"]},
            "experts": {"type": "array", "items": {"type": "string"}},
        },
    },
    "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
}
#: Why a request gets an error.
_ERRORS = {
    400: "The body is not JSON.",
    401: "The token is missing or wrong.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    422: "The inputs do not fit the model.",
    500: "The model failed, or its answer is not a number.",
    503: "The queue is full, or the server is stopping. Try again.",
    504: "There was no answer in time.",
}


def _schema(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def describe_work(key: str, answer: str) -> dict[str, Any]:
    """Return the options of a FastAPI route that answers a list of `answer` under `key`."""
    schema = {
        "type": "object",
        "required": [key],
        "properties": {key: {"type": "array", "items": {"$ref": f"#/components/schemas/{answer}"}}},
    }
    found = {200: {"description": "One answer per sample.", "content": {"application/json": {"schema": schema}}}}
    errors = {status: {"description": text, "content": _schema("Error")} for status, text in _ERRORS.items()}
    body = {"required": True, "content": _schema("Request")}
    return {"methods": ["POST"], "responses": found | errors, "openapi_extra": {"requestBody": body}}


def describe_health() -> dict[str, Any]:
    """Return the options of the FastAPI route of the server's health."""
    texts = {200: "The server answers.", 503: "The server is stopping."}
    return {
        "responses": {status: {"description": text, "content": _schema("Health")} for status, text in texts.items()}
    }


def describe_metrics() -> dict[str, Any]:
    """Return the options of the FastAPI route of the metrics."""
    content = {"text/plain": {"schema": {"type": "string"}}}
    found = {"description": "Counters in the text format of Prometheus.", "content": content}
    return {"responses": {200: found, 401: {"description": _ERRORS[401], "content": _schema("Error")}}}


_STYLE = """
:root { color-scheme: light dark; } body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 0 auto;
padding: 1rem; } h2 { margin-top: 2.5rem; overflow-wrap: anywhere; } pre { overflow-x: auto; padding: .7rem;
border: 1px solid #8886; border-radius: 6px; } dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; }
"""


def render(description: Mapping[str, Any]) -> str:
    """Return an OpenAPI description as a page, without scripts and without anything from another server.

    Args:
        description: What `app.openapi()` returns.
    """
    parts = [
        f"<p>The machine-readable description is at <a href='openapi.json'>openapi.json</a>. "
        f"OpenAPI {html.escape(str(description['openapi']))}.</p>"
    ]
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2>{html.escape(method.upper())} {html.escape(path)}</h2>")
            parts.append(f"<p>{html.escape(operation.get('description') or operation.get('summary', ''))}</p>")
            if "requestBody" in operation:
                example = json.dumps(SCHEMAS["Request"]["example"])
                command = f"curl -H 'content-type: application/json' -d '{example}' http://HOST:PORT{path}"
                parts.append(f"<pre tabindex='0'>{html.escape(command)}</pre>")
            answers = (
                f"<dt>{status}</dt><dd>{html.escape(answer['description'])} {_named(answer)}</dd>"
                for status, answer in operation["responses"].items()
            )
            parts.append(f"<dl>{''.join(answers)}</dl>")
    for name, schema in description["components"]["schemas"].items():
        parts.append(f"<h2 id='{html.escape(name)}'>{html.escape(name)}</h2>")
        parts.append(f"<pre tabindex='0'>{html.escape(json.dumps(schema, indent=2))}</pre>")
    title = html.escape(description["info"]["title"])
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><style>{_STYLE}</style></head>"
        f"<body><main><h1>{title}</h1>{''.join(parts)}</main></body></html>"
    )


def _named(answer: Mapping[str, Any]) -> str:
    """Return links to the schemas that an answer consists of."""
    names = [name for name in SCHEMAS if f"#/components/schemas/{name}" in json.dumps(answer)]
    return " ".join(f"<a href='#{name}'>{name}</a>" for name in names)
