"""A study of `merganser evolve`; of one that has not ended, how far it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from merganser.evolve import pages
from merganser.evolve.study import Study
from merganser.report.page import Page


def is_study(file: Path) -> bool:
    return file.suffix in (".sqlite", ".db") and file.is_file()


def fill(page: Page, file: Path, check: bool) -> dict[str, Any]:
    study = Study.open(file, readonly=True)
    try:
        design, trials = study.design, study.trials()
        if any(trial.valid for trial in trials):
            if not study.ended:
                page.text(
                    f"Not ended: {len(trials)} of {design.trials} trials. `merganser evolve run --resume` goes on."
                )
            pages.fill(page, study)
        else:
            page.text(f"{len(trials)} of {design.trials} trials, none of them with a score yet.")
            if study.failure:
                page.text(f"Failed: {study.failure}. When the cause is gone, --resume tries again.")
            pages.trials(page, study)
        return {"kind": "study", "file": file.name, "trials": len(trials), "ended": study.ended}
    finally:
        study.close()
