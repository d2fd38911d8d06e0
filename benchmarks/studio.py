"""What a moved slider costs: a re-merge into the model in memory, beside the text it then writes; and how long the
first view of every screen takes in Chromium. Python must be able to write byte code, or every start compiles it again.

    python -m benchmarks.studio MODELS --base NAME --models NAME NAME

MODELS is a folder with a base and two fine-tunes of it that `transformers` loads. The views need Playwright and
Chromium (`apt install chromium`, `pip install playwright`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from merganser import studio
from merganser.studio.player import Player, Prompt
from merganser.studio.roots import Roots

TOKENS = 16
#: What is merged again, with one changed weight: sums, and rules that drop entries and keep what is left.
METHODS: Mapping[str, Mapping[str, float]] = {
    "task_arithmetic": {},
    "linear": {},
    "ties": {"density": 0.5},
    "dare_ties": {"density": 0.5},
    "della": {"density": 0.5, "epsilon": 0.2},
}


def measure(folder: Path, base: str, models: list[str], repeats: int) -> None:
    """Print processor seconds of a re-merge with one changed weight, as such and as a share of a text's."""
    player = Player(Roots([folder]))

    def document(method: str, weight: float, **parameters: float) -> dict[str, Any]:
        entries = [{"path": models[0], "weight": weight}, *({"path": path, "weight": 0.4} for path in models[1:])]
        return {"method": method, "base": base, "models": entries, "parameters": parameters}

    [first, *_] = player.play([document("task_arithmetic", 0.5)])
    print(f"first load        {first['processor']:6.2f} s of processor ({first['tensors']} tensors)")
    for method, parameters in METHODS.items():
        merges, texts = [], []
        for step in range(repeats):
            found = player.play([document(method, 0.1 + 0.01 * step, **parameters)], Prompt("The", tokens=TOKENS))
            merged = next(found)
            merges.append(merged["processor"])
            began = time.process_time()
            tokens = sum(event["event"] == "token" for event in found)
            texts.append((time.process_time() - began) * TOKENS / max(1, tokens))
        best, text = min(merges[1:]), min(texts)
        print(
            f"{method:<17} {best:6.2f} s of processor (median {statistics.median(merges[1:]):.2f}), "
            f"{best / text:.2f} of the {text:.2f} s that {TOKENS} tokens take"
        )


def measure_limit(folder: Path, base: str, models: list[str], repeats: int) -> float:
    """Return the processor seconds of base + Σ w (model − base) in plain torch, whole tensors in memory: no planning,
    no blocks, no checks."""
    roots = Roots([folder])
    first, *others = [roots.open(name) for name in (base, *models)]
    names = [n for n in first.names() if any(not torch.equal(first.read(n), other.read(n)) for other in others)]
    tensors = [[opened.read(name) for opened in (first, *others)] for name in names]
    live = [each[0].float() for each in tensors]
    found = []
    for _ in range(repeats):
        began = time.process_time()
        for (zero, *tuned), target in zip(tensors, live, strict=True):
            origin = zero.float()
            total = origin.clone()
            for each in tuned:
                total.add_(each.float().sub_(origin), alpha=0.3)
            target.copy_(total.to(zero.dtype))
        found.append(time.process_time() - began)
    return min(found)


#: Screen -> a title, a button or a sentence that is there once the screen is of use; BASE and MODEL are checkpoints.
SCREENS = {
    "home": "Checkpoints",
    "checkpoint?path=BASE": "Layer map",
    "checkpoint?path=BASE&other=MODEL": "tensors compared",
    "recipe": "Method",
    "mixer": "What it says",
    "compare": "Ask all",
    "interference": "Measure",
    "library": "Build",
    "evolve": "Search for the weights",
    "landscape": "Draw the line",
    "jobs": "Every job",
}
#: Notes the time at which a text is on the page, frame by frame.
WATCH = """(() => {
  const look = () => [...document.querySelectorAll("h2, button, p")].some((e) => e.textContent.includes(TEXT))
    ? (window.useful = performance.now()) : requestAnimationFrame(look);
  requestAnimationFrame(look);
})()"""


def measure_views(folder: Path, base: str, model: str, repeats: int) -> None:
    """Print how long every screen takes in Chromium, each from a studio that was just started: to its first paint,
    until its content is there, and the processor seconds of the studio from its start to then.
    """
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        empty = statistics.median(_load_empty(browser, folder) for _ in range(repeats))
        print(f"an empty page     {empty:5.0f} ms until it is loaded, without script and style; load {_load()}")
        for screen, text in SCREENS.items():
            where = screen.replace("BASE", base).replace("MODEL", model)
            found = [_load_screen(browser, folder, where, text) for _ in range(repeats)]
            paint, useful, processor = (statistics.median(each) for each in zip(*found, strict=True))
            print(
                f"{screen:<34} {paint:5.0f} ms to the first paint, {useful:5.0f} ms to its content, "
                f"{processor:.2f} s of processor; load {_load()}"
            )
        browser.close()


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


@contextlib.contextmanager
def _studio(folder: Path) -> Iterator[tuple[int, str, str]]:
    """Start a studio; yields its process, its address and its token."""
    command = [sys.executable, "-m", "merganser", "studio", str(folder), "--port", "0", "--json", "--state"]
    with tempfile.TemporaryDirectory() as state:
        server = subprocess.Popen([*command, state], stdout=subprocess.PIPE, text=True)
        try:
            address, _, token = json.loads((server.stdout or sys.stdin).readline())["url"].partition("#token=")
            yield server.pid, address, token
        finally:
            server.kill()
            server.wait()


def _processor(process: int) -> float:
    words = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _load_empty(browser: Any, folder: Path) -> float:
    with _studio(folder) as (_, address, _), contextlib.closing(browser.new_page()) as page:
        page.route("**/studio.*", lambda route: route.abort())
        page.goto(address)
        found: float = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        return found


def _load_screen(browser: Any, folder: Path, screen: str, text: str) -> tuple[float, float, float]:
    """Return the milliseconds from the navigation to the first paint and to the text, with nothing in the cache, and
    the processor seconds of the studio from its start until then.
    """
    with _studio(folder) as (process, address, token), contextlib.closing(browser.new_page()) as page:
        page.add_init_script(f"sessionStorage.setItem('merganser-token', {token!r})")
        page.add_init_script(WATCH.replace("TEXT", json.dumps(text)))
        page.goto(f"{address}#/{screen}")
        painted = "performance.getEntriesByName('first-contentful-paint')[0]"
        page.wait_for_function(f"() => window.useful && {painted}", timeout=120_000)
        processor = _processor(process)
        paint, useful = page.evaluate(f"[{painted}.startTime, window.useful]")
        return paint, useful, processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=8)
    given = parser.parse_args()
    size = sum(file.stat().st_size for file in (Path(studio.__file__).parent / "static").iterdir())
    print(f"page              {size / 1000:6.0f} kB")
    measure_views(given.folder, given.base, given.models[0], 3)
    limit = measure_limit(given.folder, given.base, given.models, given.repeats)
    print(f"plain torch       {limit:6.2f} s of processor: the same sum with nothing around it")
    measure(given.folder, given.base, given.models, given.repeats)


if __name__ == "__main__":
    main()
