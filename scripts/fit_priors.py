"""Fit results/priors.json from the training rows of the published runs and from results/records. Run from a checkout.

Usage: scripts/fit-priors            writes results/priors.json
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tunecast.calibrate.priors_fit import fit_priors
from tunecast.calibrate.priors_problem import read_training
from tunecast.calibrate.priors_records import shipped_records

ROOT = Path(__file__).resolve().parent.parent


def rows_on_lines(text: str) -> str:
    """Lists of numbers on a line each: the covariance has thousands."""
    return re.sub(r"\[[-+\d.e,\s]+\]", lambda found: " ".join(found[0].split()), text)


def main() -> None:
    """Write the priors, sorted and with a trailing newline, so that they diff."""
    training = read_training(ROOT / "results" / "published" / "published-runs.csv")
    priors = fit_priors(training, shipped_records())
    target = ROOT / "results" / "priors.json"
    target.write_text(rows_on_lines(json.dumps(priors, indent=1, sort_keys=True)) + "\n", encoding="utf-8")
    print(f"{len(priors['rows_used'])} rows used, {sum(priors['rows_skipped'].values())} skipped; wrote {target}")
    for name, steps in priors["records_used"].items():
        print(f"{name}: {steps} whole steps used")
    for name, reason in priors["records_skipped"].items():
        print(f"{name} skipped: {reason}")


if __name__ == "__main__":
    main()
