"""Models behind a server that speaks the OpenAI protocol: the same answers as the model in memory."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from merganser.errors import InputError, MerganserError
from merganser.evaluate import endpoints
from merganser.evaluate.endpoints import Server
from merganser.evaluate.examiners import MultipleChoice
from merganser.evaluate.generation import ExactMatch, Generation
from merganser.evaluate.judges import Judged
from merganser.evaluate.loaders import Loader
from merganser.evaluate.models import evaluate
from merganser.evaluate.questions import tokenizer_at
from merganser.evaluate.tasks import Task


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body, self.headers.get("Authorization")))
        status, reply = self.server.answer(self.path, body)
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def serve(monkeypatch):
    """Start a server that answers with a function of path and body; its address, and what it was asked."""
    monkeypatch.setattr(endpoints.time, "sleep", lambda seconds: None)
    running = []

    def start(answer):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.answer, server.seen = answer, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1", server.seen

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def served(serve, llamas):
    """A tiny Llama behind a server, as vLLM would have it: prompts are echoed with log-probabilities."""
    model = Loader("causal-lm", str(llamas / "math"))().eval()
    tokenizer = tokenizer_at(str(llamas / "base"))

    def answer(path, body):
        batch = tokenizer(body["prompt"], return_offsets_mapping=True)
        ids = torch.tensor([batch["input_ids"]])
        with torch.inference_mode():
            if not body.get("echo"):
                new = model.generate(ids, max_new_tokens=body["max_tokens"], do_sample=False, pad_token_id=0)
                return 200, {"choices": [{"text": tokenizer.decode(new[0, ids.shape[1] :])}]}
            logs = model(ids).logits[0].log_softmax(-1)
        values = [None, *(float(logs[i, token]) for i, token in enumerate(ids[0, 1:].tolist()))]
        # the token that is written after the prompt comes too
        places = [start for start, _ in batch["offset_mapping"]] + [len(body["prompt"])]
        return 200, {"choices": [{"text": "", "logprobs": {"token_logprobs": [*values, -1.0], "text_offset": places}}]}

    return model, serve(answer)[0]


def test_a_served_model_answers_as_it_does_in_memory(llamas, served):
    model, url = served
    server, base = Server(url, "math"), str(llamas / "base")
    quiz = MultipleChoice(str(llamas / "quiz.jsonl"), base)
    words = ExactMatch(str(llamas / "sums.jsonl"), base, max_new_tokens=4, stop=())
    with torch.inference_mode():
        here, there = quiz(model, range(12)), MultipleChoice(str(llamas / "quiz.jsonl"), "")(server, range(12))
        assert there["score"] == here["score"]
        assert there["soft"] == pytest.approx(here["soft"], abs=1e-4)
        assert words(server, range(4))["score"] == words(model, range(4))["score"]


def test_evaluate_takes_a_server_for_a_model(llamas, served):
    task = Task("quiz", "multiple-choice", str(llamas / "quiz.jsonl"))
    found = evaluate(f"{served[1]}#math", [f"{served[1]}#code"], [task], limit=6)
    assert found.verdict == "sound"
    assert found.normalized == 1.0
    for tasks, message in (((), "give tasks"), ([Task("t", "perplexity", str(llamas / "texts.tsv"))], "in memory")):
        with pytest.raises(InputError, match=message):
            evaluate(f"{served[1]}#math", tasks=tasks)
    with pytest.raises(InputError, match="expected the address of a server and a model"):
        Server.parse("127.0.0.1:8000")


def test_a_busy_server_is_asked_again_and_others_are_not(serve, monkeypatch):
    monkeypatch.setenv(endpoints.KEY, "secret")
    replies = [(503, {}), (200, {"choices": [{"text": " 18\nQuestion: more"}]})]
    url, seen = serve(lambda path, body: replies.pop(0))
    asked = [{"question": "3 * 6?", "answer": "18"}]
    assert Generation(asked, "")(Server(url, "m"), [0])["score"] == [1.0]
    assert [path for path, _, _ in seen] == ["/v1/completions"] * 2
    assert {key for _, _, key in seen} == {"Bearer secret"}
    url, seen = serve(lambda path, body: (404, {"error": "no such model"}))
    with pytest.raises(MerganserError, match="status 404.*no such model"):
        Server(url, "m").complete(["x"], 1)
    assert len(seen) == 1
    url, _ = serve(lambda path, body: (200, {"hello": 1}))
    with pytest.raises(MerganserError, match="without choices"):
        Server(url, "m").complete(["x"], 1)


def test_a_server_without_log_probabilities_says_what_to_do(serve):
    url, _ = serve(lambda path, body: (200, {"choices": [{"text": "x", "logprobs": None}]}))
    quiz = MultipleChoice([{"question": "?", "options": ["a", "b"], "answer": 0}], "")
    with pytest.raises(InputError, match="use kind choice"):
        quiz(Server(url, "m"), [0])


def test_a_judge_decides(serve):
    def answer(path, body):
        if path.endswith("chat/completions"):
            said = body["messages"][0]["content"]
            verdict = "Hm." if "vague" in said else "No, wait: yes." if "Reply: Paris" in said else "no"
            return 200, {"choices": [{"message": {"content": verdict}}]}
        return 200, {"choices": [{"text": "Paris" if "France" in body["prompt"] else "vague"}]}

    url, _ = serve(answer)
    asked = [{"question": "Capital of France?", "answer": "Paris"}, {"question": "Italy?", "answer": "Rome"}]
    quiz = Judged(asked, "", judge=f"{url}#judge", instruction="{question} Reply: {reply}")
    assert quiz(Server(url, "m"), [0])["score"] == [1.0]
    with pytest.raises(MerganserError, match="neither yes nor no"):
        quiz(Server(url, "m"), [1])
    with pytest.raises(InputError, match="needs a judge"):
        len(Judged(asked, ""))
    with pytest.raises(InputError, match="asks for the field 'rply'"):
        len(Judged(asked, "", judge=f"{url}#judge", instruction="{rply}"))
