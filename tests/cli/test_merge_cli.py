"""The command as its user runs it: what it prints, what it leaves behind, how it ends."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from merganser.cli import main
from merganser.engine import processes
from merganser.engine.disk import Disk

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`merganser ARGS` in this process: exit code, standard output, standard error."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["merganser", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return int(stopped.value.code or 0), out, err

    return call


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Callable[..., Path]) -> Path:
    """A base and two models of several tensors, with a recipe beside them."""
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "a", "b"):
        layers = {f"layers.{i}.w": torch.randn(40, 30, generator=generator) for i in range(6)}
        checkpoint(name, layers | {"head": torch.randn(5, 30, generator=generator)})
    file = tmp_path / "recipe.yml"
    file.write_text("method: ties\nbase: ./base\nmodels: [./a, ./b]\nparameters: {density: 0.4}\nseed: 1\n")
    return file


def digest(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def test_a_merge_end_to_end(run: Run, recipe: Path, tmp_path: Path) -> None:
    code, out, _ = run("merge", recipe, tmp_path / "out")
    assert code == 0
    assert "ties × 7" in out
    assert "wrote" in out
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == load_file(tmp_path / "a" / "model.safetensors").keys()
    )
    assert "ties" in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out.partial").exists()


def test_dry_run_reads_no_weights_and_writes_nothing(run: Run, recipe: Path, tmp_path: Path) -> None:
    code, out, _ = run("merge", recipe, tmp_path / "out", "--dry-run")
    assert code == 0
    assert "reads" in out
    assert "at most" in out
    assert not (tmp_path / "out").exists()
    code, out, _ = run("merge", recipe, tmp_path / "out", "--dry-run", "--json")
    plan = json.loads(out)
    assert plan["tensors"] == 7
    assert plan["bytes_in"] == 3 * plan["bytes_out"]


def test_json_lines(run: Run, recipe: Path, tmp_path: Path) -> None:
    code, out, _ = run("merge", recipe, tmp_path / "out", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [events[0]["event"], events[-1]["event"]] == ["plan", "done"]
    assert events[-2]["done"] == events[-2]["total"]
    code, out, _ = run("merge", recipe, tmp_path / "out", "--json")
    assert code == 2
    assert json.loads(out.splitlines()[-1])["event"] == "error"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (("density", "densty"), [], "unknown parameter 'densty'.*did you mean 'density'"),
        (("ties", "tiess"), [], "unknown method 'tiess'.*did you mean 'ties'"),
        (("./b]", "./c]"), [], "./c: no such file"),
        (("0.4", "7"), [], "out of bounds"),
        (("method: ties", "method: [ties"), [], "recipe.yml"),
        ((), ["--memory", "lots"], "'lots' is not a size"),
        ((), ["--memory", "1KB"], "one tensor alone needs"),
        ((), ["--device", "gpu9"], "not usable here"),
        ((), ["--device", "gpu9", "--dry-run"], "not usable here"),
        ((), ["--device", "meta"], "not usable here"),
    ],
)
def test_bad_input_is_refused_before_work(
    run: Run, recipe: Path, tmp_path: Path, change: tuple[str, str], options: list[str], message: str
) -> None:
    if change:
        recipe.write_text(recipe.read_text().replace(*change))
    code, _, err = run("merge", recipe, tmp_path / "out", *options)
    assert code == 2
    assert re.search(message, err, re.DOTALL), err
    assert not list(tmp_path.glob("out*"))


def test_damaged_sources_are_refused_before_work(run: Run, recipe: Path, tmp_path: Path, checkpoint: Any) -> None:
    weights = tmp_path / "a" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    code, _, err = run("merge", recipe, tmp_path / "out")
    assert (code, "truncated" in err) == (2, True)
    weights.write_bytes(content)
    tensors = load_file(weights)
    checkpoint("a", {k: v for k, v in tensors.items() if k != "head"})
    code, _, err = run("merge", recipe, tmp_path / "out")
    assert (code, "'head'" in err) == (2, True)
    checkpoint("a", tensors | {"head": torch.zeros(5, 31)})
    code, _, err = run("merge", recipe, tmp_path / "out")
    assert (code, "[5, 31]" in err and "[5, 30]" in err) == (2, True)
    assert not list(tmp_path.glob("out*"))


def test_nan_in_a_source(run: Run, recipe: Path, tmp_path: Path, checkpoint: Any) -> None:
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["head"][1, 2] = float("nan")
    checkpoint("a", tensors)
    code, _, err = run("merge", recipe, tmp_path / "out")
    assert (code, "'head' contains NaN" in err) == (2, True)
    assert not (tmp_path / "out").exists()
    assert run("merge", recipe, tmp_path / "out", "--allow-nan", "--overwrite")[0] == 0


@pytest.mark.parametrize("operation", [3, 9, 15, 21, 24])
def test_kill_9_then_resume_gives_the_same_bytes(run: Run, recipe: Path, tmp_path: Path, operation: int) -> None:
    assert run("merge", recipe, tmp_path / "reference")[0] == 0
    child = os.fork()
    if child == 0:  # the child dies in the middle of a disk operation
        count = 0

        def before(self: Disk, name: str, path: Path) -> None:
            nonlocal count
            count += 1
            if count == operation:
                os.kill(os.getpid(), signal.SIGKILL)

        Disk.before = before  # type: ignore[method-assign]
        from merganser.recipes.running import run as merge

        merge(recipe, tmp_path / "out", workers=1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert not (tmp_path / "out").exists()
    if (tmp_path / "out.partial").exists():
        assert run("merge", recipe, tmp_path / "out")[0] == 2
    code, _, err = run("merge", recipe, tmp_path / "out", "--resume")
    assert code == 0, err
    assert digest(tmp_path / "out") == digest(tmp_path / "reference")


def test_a_full_disk_says_so_and_resumes(run: Run, recipe: Path, tmp_path: Path) -> None:
    assert run("merge", recipe, tmp_path / "reference")[0] == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        code, _, err = run("merge", recipe, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert "--resume" in err
    assert run("merge", recipe, tmp_path / "out", "--resume")[0] == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "reference")


def test_a_broken_sidecar_is_said_by_a_dry_run(run: Run, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "base" / "tokenizer_config.json").write_text("[]")
    recipe.write_text(recipe.read_text() + "output: {chat_template: chatml}\n")
    code, _, err = run("merge", recipe, tmp_path / "out", "--dry-run")
    assert code == 2
    assert "base/tokenizer_config.json: expected a JSON object" in err


def with_open_files(soft: int, hard: int, *args: object) -> tuple[int, str]:
    """Exit code and standard error of `merganser ARGS` where so many files may be open."""
    done = subprocess.run(
        [sys.executable, "-m", "merganser", *map(str, args)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


def test_more_files_to_write_than_may_be_open(recipe: Path, tmp_path: Path, checkpoint: Any) -> None:
    for name in ("a", "b"):
        checkpoint(name, {f"w{i}": torch.ones(8) for i in range(80)})
    recipe.write_text("method: linear\nmodels: [./a, ./b]\noutput: {shard_size: 32}\n")
    code, err = with_open_files(64, 64, "merge", recipe, tmp_path / "out", "--workers", 1)
    assert code == 1
    assert "too many open files; raise the limit (ulimit -n) and continue with --resume" in " ".join(err.split())
    code, err = with_open_files(64, 1000, "merge", recipe, tmp_path / "out", "--workers", 1, "--resume")
    assert code == 0, err


def test_more_files_to_read_than_may_be_open(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    names = {f"w{i}": f"part-{i}.safetensors" for i in range(80)}
    for name, file in names.items():
        save_file({name: torch.ones(8)}, tmp_path / "a" / file)
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    code, err = with_open_files(64, 64, "inspect", tmp_path / "a")
    assert code == 2
    assert "too many open files; raise the limit (ulimit -n)" in err
    code, err = with_open_files(64, 1000, "inspect", tmp_path / "a")
    assert code == 0, err


@pytest.fixture
def interrupted(run: Run, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a merge to `out` says that is interrupted after its first tensor."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("merganser.cli.progress.ProgressReporter.__call__", stop)
        code, _, err = run("merge", recipe, tmp_path / "out", "--workers", 1)
    assert code == 130
    return err


def test_an_interrupted_merge_says_what_is_left_and_how_to_go_on(
    run: Run, recipe: Path, tmp_path: Path, interrupted: str
) -> None:
    said = re.fullmatch(r"interrupted: (\S+) keeps what is finished; continue with: merganser (.*)\n", interrupted)
    assert said is not None
    assert Path(said[1]) == tmp_path / "out.partial"
    assert Path(said[1]).is_dir()
    assert run(*shlex.split(said[2]))[0] == 0
    assert run("merge", recipe, tmp_path / "reference")[0] == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "reference")


@pytest.mark.parametrize("args", [["merge", "recipe.yml", "out"], ["inspect", "a"]])
def test_an_interruption_before_anything_is_written(
    run: Run, recipe: Path, tmp_path: Path, args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("merganser.checkpoints.safetensors_file.read_header", stop)
    assert run(*args)[::2] == (130, "interrupted: nothing was written\n")
    assert not list(tmp_path.glob("out*"))


def test_a_complete_output_needs_no_resuming(run: Run, recipe: Path, tmp_path: Path, checkpoint: Any) -> None:
    assert run("merge", recipe, tmp_path / "out")[0] == 0
    before = (tmp_path / "out").stat().st_ino
    code, out, _ = run("merge", recipe, tmp_path / "out", "--resume")
    assert (code, "out was already made by this recipe" in out) == (0, True)
    code, out, _ = run("merge", recipe, tmp_path / "out", "--resume", "--json")
    assert (code, json.loads(out.splitlines()[-1])["already_complete"]) == (0, True)
    assert (tmp_path / "out").stat().st_ino == before
    written = recipe.read_text()
    recipe.write_text(written.replace("0.4", "0.5"))
    code, _, err = run("merge", recipe, tmp_path / "out", "--resume")
    assert (code, "out exists already" in err) == (2, True)
    recipe.write_text(written)
    checkpoint("b", load_file(tmp_path / "a" / "model.safetensors"))
    code, _, err = run("merge", recipe, tmp_path / "out", "--resume")
    assert (code, "out exists already" in err) == (2, True)


def test_an_input_with_nan_leaves_nothing_in_the_way(run: Run, recipe: Path, tmp_path: Path, checkpoint: Any) -> None:
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    checkpoint("b", {k: v * (float("nan") if k == "head" else 1) for k, v in tensors.items()})
    code, _, err = run("merge", recipe, tmp_path / "out", "--workers", 1)
    assert (code, "contains NaN" in err) == (2, True)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    checkpoint("b", tensors)
    assert run("merge", recipe, tmp_path / "out")[0] == 0


@pytest.mark.parametrize("nested", [False, True])
def test_a_recipe_inside_the_output_is_not_lost(run: Run, recipe: Path, tmp_path: Path, nested: bool) -> None:
    (tmp_path / "out").mkdir()
    inner = tmp_path / "out" / "inner.yml"
    inner.write_text(recipe.read_text().replace("./", "../"))
    outer = tmp_path / "outer.yml"
    outer.write_text("method: linear\nmodels: [{recipe: out/inner.yml}, ./a]\n")
    code, _, err = run("merge", outer if nested else inner, tmp_path / "out", "--overwrite")
    assert (code, "out cannot be replaced: the input" in err) == (2, True)
    assert inner.exists()


@pytest.mark.usefixtures("interrupted")
def test_resume_with_another_recipe_is_refused(run: Run, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace("0.4", "0.5"))
    code, _, err = run("merge", recipe, tmp_path / "out", "--resume")
    assert (code, "started with another recipe" in err) == (2, True)


def test_a_recipe_on_standard_input(run: Run, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("merge", recipe, "reference")[0] == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(recipe.read_bytes()), "ascii"))
    assert run("merge", "-", "out")[0] == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "reference")
    os.mkfifo("pipe")
    threading.Thread(target=Path("pipe").write_text, args=(recipe.read_text(),)).start()
    assert run("merge", "pipe", "out", "--overwrite")[0] == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "reference")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"method: [linear")))
    code, _, err = run("merge", "-", "out")
    assert (code, "standard input: not valid YAML" in err) == (2, True)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_merge_outlives_the_reader_of_its_output(recipe: Path, tmp_path: Path, options: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = command(["merge", recipe, tmp_path / "out", *options], stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "args", [["merge", "recipe.yml", "out", "--json"], ["merge", "recipe.yml", "out"], ["methods"]]
)
def test_a_full_standard_output_is_said_in_one_line(recipe: Path, tmp_path: Path, args: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = command(args, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path)
    assert ended.returncode == 1
    assert re.fullmatch(r"error: .*No space left on device.*\n", ended.stderr)
    assert not list(tmp_path.glob("out*"))


def command(args: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    """`merganser ARGS` in a process of its own."""
    return subprocess.run([sys.executable, "-m", "merganser", *map(str, args)], text=True, **options)


def test_version_and_unknown_command(run: Run) -> None:
    from merganser import __version__

    assert run("--version")[1].strip() == __version__
    assert run("marge")[0] == 2


def test_workers_of_the_command_are_processes(
    run: Run, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    monkeypatch.setattr(processes, "is_worthwhile", lambda work, workers: used.append(workers))
    assert run("merge", recipe, tmp_path / "out", "--workers", "3")[0] == 0
    assert used == [3]
