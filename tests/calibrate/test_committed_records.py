"""Every record that the repository keeps can be read, and fitted again by today's code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ci_share import some_for_ci

from tunecast.calibrate.fit import fit_record
from tunecast.calibrate.record import read_record
from tunecast.calibrate.trace.spec import architecture_from_dict, run_from_dict
from tunecast.catalogs.errors import InputError
from tunecast.model.factors_io import factor_set_from_record, factors_from_dict

RECORDS = sorted((Path(__file__).parents[2] / "results" / "records").glob("*.json"))
EARLY = Path(__file__).parents[1] / "fixtures" / "early_step_architecture.json"


@pytest.mark.parametrize("path", some_for_ci(RECORDS, len(RECORDS)), ids=lambda path: path.stem)
def test_a_committed_record_is_fitted_again(path: Path) -> None:
    """CI fits the smallest, a CPU's; cards' are there those of mocks, in other files."""
    record = read_record(path)
    stored, again = factor_set_from_record(record, name=path.name), factors_from_dict(fit_record(record))
    assert again.gpu == stored.gpu
    assert set(again.curves) == set(stored.curves)
    for name, factor in stored.factors.items():
        if name.startswith("gemm."):
            assert again.factors[name].value == pytest.approx(factor.value, rel=0.25)


def test_there_is_a_record_to_fit() -> None:
    assert RECORDS


def test_the_first_records_step_architecture_is_still_read() -> None:
    """Written when a layer had a field ``norms``."""
    architecture = architecture_from_dict(json.loads(EARLY.read_text(encoding="utf-8")))
    assert architecture.num_layers == 2
    assert architecture.groups[0].layer.norms == 2


def test_the_first_records_run_is_still_read() -> None:
    early = {"method": "lora", "lora_r": 16, "lora_target_modules": ["q_proj"], "max_length": 64}
    assert run_from_dict(early).lora_target_modules == ("q_proj",)


def test_a_newer_version_number_is_refused_even_under_an_old_name(tmp_path: Path) -> None:
    record = json.loads(RECORDS[0].read_text(encoding="utf-8")) | {"schema_version": 2}
    path = tmp_path / "newer.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(InputError, match="newer tunecast"):
        read_record(path)


def test_a_rate_at_or_below_zero_is_a_damaged_fit() -> None:
    fitted = json.loads(RECORDS[0].read_text(encoding="utf-8"))["fitted"]
    fitted["curves"]["gemm.bf16"]["params"]["flops_per_s"] = -5
    with pytest.raises(InputError, match="damaged"):
        factors_from_dict(fitted)
