"""The whole path on a simulated GPU: calibrate, refuse, fit, estimate, compare."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tunecast.cli.program import program

pytestmark = pytest.mark.slow
MODEL = "meta-llama/Llama-3.1-8B"
MOCK = "mock:a100-sxm4-80gb"


def tunecast(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        program([str(argument) for argument in arguments], prog_name="tunecast")
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


@pytest.fixture(scope="module")
def unfitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quick calibration of a mock A100, not fitted."""
    from tunecast import calibrate_device

    return calibrate_device(MOCK, out=tmp_path_factory.mktemp("records"), fit=False)


@pytest.fixture(scope="module")
def fit_told(unfitted: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The same record, fitted by the command, and what that said."""
    path = shutil.copy(unfitted, tmp_path_factory.mktemp("fitted"))
    return Path(path), CliRunner().invoke(program, ["fit", str(path)])


@pytest.fixture(scope="module")
def fitted(fit_told: tuple[Path, Result]) -> Path:
    return fit_told[0]


def test_an_unfitted_record_is_refused_with_the_command_that_fits_it(
    unfitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = tunecast(capsys, "estimate", MODEL, "--gpu", MOCK, "--record", unfitted)
    assert (code, out) == (2, "")
    assert f"tunecast fit {unfitted}" in err


def test_a_record_moves_the_forecast_of_its_device_and_says_so(
    fitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("estimate", MODEL, "--method", "qlora", "--max-length", "2048", "--gpu", MOCK, "--json")
    _, prior_out, _ = tunecast(capsys, *arguments)
    code, out, err = tunecast(capsys, *arguments, "--record", fitted)
    (prior,), (measured,) = json.loads(prior_out), json.loads(out)
    assert (code, err) == (0, "")
    assert f"measured:{fitted.name}" in measured["origins"].values()
    assert not [origin for origin in prior["origins"].values() if origin.startswith("measured:")]
    width = {name: f["step_time_s"]["high"] / f["step_time_s"]["low"] for name, f in (("p", prior), ("m", measured))}
    assert width["m"] < width["p"]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("openai/gpt-oss-20b", ("--method", "qlora", "--max-length", "4096")),
        ("Qwen/Qwen2.5-7B", ("--method", "lora", "--max-length", "4096", "--attn-implementation", "eager")),
    ],
)
def test_attention_as_plain_products_is_forecast_as_it_is_measured(
    model: str, options: tuple[str, ...], fitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A third of these steps are softmaxes of rows and rows joined and cut, which no step of a calibration has."""
    _, out, _ = tunecast(capsys, "estimate", model, *options, "--gpu", MOCK, "--record", fitted, "--json")
    (forecast,) = json.loads(out)
    _, out, _ = tunecast(capsys, "measure", model, *options, "--device", MOCK, "--json")
    (measured,) = json.loads(out)
    step, truth = forecast["step_time_s"], measured["step_time_s"]["value"]
    assert step["value"] == pytest.approx(truth, rel=0.05)
    assert step["low"] < truth < step["high"]
    assert step["high"] / step["low"] < 1.15


def test_a_record_of_another_device_is_refused(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = tunecast(capsys, "estimate", MODEL, "--gpu", "a100-sxm4-80gb", "--record", fitted)
    assert code == 2
    assert f"{MOCK}#0" in err


def test_two_records_of_one_device_are_refused(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = tunecast(capsys, "estimate", MODEL, "--gpu", MOCK, "--record", fitted, "--record", fitted)
    assert code == 2
    assert "keep one" in err


def test_a_record_against_itself_differs_in_nothing(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tunecast(capsys, "compare", fitted, fitted, "--json")
    pairs: list[dict[str, Any]] = json.loads(out)["between_records"][0]["trials"]
    assert code == 0
    assert {pair["verdict"] for pair in pairs} == {"not significant"}
    assert {pair["ratio"] for pair in pairs} == {1.0}


def test_the_mock_is_shown_against_the_card_it_imitates(fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = tunecast(capsys, "compare", fitted, "--json")
    rows = {row["name"]: row for row in json.loads(out)["against_catalog"][0]["quantities"]}
    assert rows["matrix product bf16"]["catalog"] == pytest.approx(312)
    assert rows["memory copy"]["catalog"] == pytest.approx(2039)
    assert all(0 < row["share"] < 1.03 for row in rows.values() if row["share"] is not None)


def test_tables_of_records_fit_a_narrow_terminal(
    fitted: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = tunecast(capsys, "compare", fitted, fitted)
    assert max(map(len, out.splitlines())) <= 80
    assert "not significant" in out


def test_fitted_factors_are_shown_in_readable_units(fit_told: tuple[Path, Result]) -> None:
    """The rate that the fit's products would tend to, were they never bound by bytes, is of the order of the card's 312
    TFLOP/s, and says TFLOP/s."""
    record, told = fit_told
    (line,) = [line for line in told.stdout.splitlines() if "gemm.bf16.flops_per_s" in line]
    assert told.exit_code == 0
    assert 200 < float(line.split()[1]) < 1.5 * 312
    assert line.split()[-1] == "TFLOP/s"
    assert json.loads(record.read_text())["fitted"]["schema"] == "tunecast.fitted/1"
