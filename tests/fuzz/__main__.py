"""`python -m fuzz`: damage every kind of file the product reads, and count what comes of it.

python -m fuzz --cases 2000 --jobs 2
python -m fuzz --target gguf --start 1234 --cases 1     one case again
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter

from fuzz.harness import GOOD, run_cases
from fuzz.targets import all_targets


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="cases of each target")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="stop after so long, whatever was tried")
    parser.add_argument("--target", action="append", help="only these targets")
    parser.add_argument("--json", action="store_true", help="print the counts and failures as JSON")
    options = parser.parse_args()
    targets = [target for target in all_targets() if not options.target or target.name in options.target]
    begun = time.monotonic()
    counts: dict[str, Counter[str]] = {target.name: Counter() for target in targets}
    failures: list[tuple[str, int, str, str]] = []
    for name, number, verdict, said in run_cases(targets, options.cases, options.seed, options.jobs, options.start):
        counts[name][verdict] += 1
        if verdict not in GOOD:
            failures.append((name, number, verdict, said))
            if not options.json:
                print(f"{name} {number}: {verdict}: {said}", flush=True)
        if options.seconds and time.monotonic() - begun > options.seconds:
            break
    seconds = time.monotonic() - begun
    if options.json:
        print(json.dumps({"counts": counts, "failures": sorted(failures), "seconds": seconds}))
        return bool(failures)
    total = sum(counts.values(), Counter())
    for name, each in [*counts.items(), ("all", total)]:
        print(f"{name:12} {sum(each.values()):6} tried  " + "  ".join(f"{n} {v}" for v, n in sorted(each.items())))
    print(f"{sum(total.values()) / max(seconds, 1e-9) * 60:.0f} cases a minute")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
