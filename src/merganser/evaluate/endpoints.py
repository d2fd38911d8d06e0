"""Models behind an OpenAI-compatible server (vLLM, llama.cpp, TGI …), asked like models in memory.

Examiners accept a `Server` in place of a model. Options of multiple choice are scored by the log-probabilities of the
prompt's tokens, if the server returns them (`echo` with `logprobs`, as vLLM does); replies come from `completions`.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from merganser.errors import InputError, MerganserError
from merganser.strict_json import parse_json

#: Environment variable with the API key, for servers that require one.
KEY = "OPENAI_API_KEY"
#: Maximum attempts at a request, and the status codes that are retried.
ATTEMPTS, BUSY = 4, (429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Server:
    """A model of an OpenAI-compatible server.

    Attributes:
        url: The server's address up to and including `/v1`.
        model: The server's name of the model.
        at_once: The number of simultaneous requests.
        timeout: Seconds to wait for an answer.

    Example:
        >>> Server("http://127.0.0.1:8000/v1", "merged").complete(["1 + 1 ="], 4, ["\\n"])  # doctest: +SKIP
        [' 2']
    """

    url: str
    model: str
    at_once: int = 8
    timeout: float = 120.0

    @classmethod
    def parse(cls, text: str) -> Server:
        """Parse `http://host:port/v1#model` into a server."""
        url, _, model = text.partition("#")
        if not url.startswith(("http://", "https://")) or not model:
            raise InputError(f"{text!r}: expected the address of a server and a model, http://host:port/v1#model")
        return cls(url.rstrip("/"), model)

    def complete(self, prompts: Sequence[str], tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Return the greedy continuation of each prompt, up to a stop string (at most four are sent)."""
        bodies = [
            {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, **({"stop": list(stop[:4])} if stop else {})}
            for prompt in prompts
        ]
        return [str(self._first_choice(reply).get("text", "")) for reply in self._map("completions", bodies)]

    def chat(self, conversations: Sequence[Sequence[Mapping[str, str]]], tokens: int) -> list[str]:
        """Return the model's next turn in each conversation."""
        bodies = [{"messages": list(turns), "max_tokens": tokens, "temperature": 0.0} for turns in conversations]
        replies = self._map("chat/completions", bodies)
        return [str((self._first_choice(reply).get("message") or {}).get("content") or "") for reply in replies]

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return log p(continuation | prompt) for each pair of texts.

        Raises:
            InputError: If the server does not return log-probabilities of the prompt.
        """
        bodies = [
            {"prompt": prompt + rest, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": 1}
            for prompt, rest in pairs
        ]
        replies = self._map("completions", bodies)
        return [self._likelihood(reply, prompt, rest) for reply, (prompt, rest) in zip(replies, pairs, strict=True)]

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Have the server load a LoRA adapter, as vLLM does if it was started for that.

        Args:
            name: The name under which the adapter is asked.
            path: Its directory, which the server reads.
        """
        try:
            self._send("load_lora_adapter", {"lora_name": name, "lora_path": os.fspath(path)})
        except MerganserError as error:
            if isinstance(error.__cause__, urllib.error.HTTPError) and error.__cause__.code in (404, 405):
                raise InputError(
                    f"{self.url}: this server loads no adapters while it runs, as vLLM does with "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and adapters enabled"
                ) from error
            raise

    def unload_adapter(self, name: str) -> None:
        """Have the server forget an adapter."""
        self._send("unload_lora_adapter", {"lora_name": name})

    def _likelihood(self, reply: Any, prompt: str, rest: str) -> float:
        found = self._first_choice(reply).get("logprobs") or {}
        logs, places = found.get("token_logprobs"), found.get("text_offset")
        if not logs or not places or len(logs) != len(places):
            raise InputError(
                f"{self.url}: does not return log-probabilities of the prompt (echo with logprobs), which score "
                "options; use kind choice instead, which reads what the model writes"
            )
        # A token that spans the end of the prompt counts for the continuation.
        ends = [*places[1:], len(prompt) + len(rest)]
        whole = len(prompt) + len(rest)
        inside = [
            log for log, start, end in zip(logs, places, ends, strict=True) if len(prompt) < end and start < whole
        ]
        if not inside or any(log is None for log in inside):
            raise MerganserError(f"{self.url}: no log-probability for {rest[:40]!r}")
        return float(sum(inside))

    def _first_choice(self, reply: Any) -> Any:
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise MerganserError(f"{self.url}: returned an answer without choices; is it an OpenAI-compatible server?")
        return choices[0]

    def _map(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        with ThreadPoolExecutor(max(1, self.at_once)) as pool:
            return list(pool.map(lambda body: self._post(path, {"model": self.model, **body}), bodies))

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return parse_json(self._send(path, body))
        except ValueError as error:
            raise MerganserError(f"{self.url}/{path}: {error}") from error

    def _send(self, path: str, body: Mapping[str, Any]) -> str:
        """Post a request and return the text of the answer; a busy server is asked again."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), headers)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    text: str = reply.read().decode("utf-8")
                    return text
            except urllib.error.HTTPError as error:
                if error.code not in BUSY or attempt == ATTEMPTS:
                    said = error.read(300).decode("utf-8", "replace").strip()
                    raise MerganserError(f"{self.url}/{path}: status {error.code}: {said}") from error
            except (OSError, ValueError) as error:
                if attempt == ATTEMPTS:
                    raise MerganserError(f"{self.url}/{path}: {error}") from error
            time.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable")
