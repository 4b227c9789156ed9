"""What a tornado leaves as it was asked for while it moves one thing, and pictures that have nothing to show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tunecast
from tunecast.catalogs.errors import InputError
from tunecast.cli.program import program
from tunecast.sweep import sweep
from tunecast.sweep_plots import plot_sweep

MODEL = "meta-llama/Llama-3.2-1B"
RUN: dict[str, Any] = {"method": "qlora", "max_length": 512, "tokens": "1M"}
GPU = "l40s-48gb"
runner = CliRunner()


@pytest.mark.parametrize("minutes_asked", [["setup=60"], "setup=60", {"setup": 60.0}])
def test_the_users_own_minutes_stay_while_another_phase_moves(minutes_asked: Any) -> None:
    own = {**RUN, "phase_min": minutes_asked}
    found = sweep(MODEL, gpu=GPU, metric="time", **own)
    bars = {bar.name: bar for bar in found.bars}
    assert "phase setup" not in bars
    minutes = [10.0, 0.5]
    for end, value in zip((bars["phase start"].high, bars["phase start"].low), minutes, strict=True):
        (alone,) = tunecast.estimate(MODEL, gpu=GPU, **{**own, "phase_min": ["setup=60", f"start={value}"]})
        assert end == pytest.approx(alone.total_time_h.value, rel=1e-3)


def test_own_prices_leave_no_dearer_offer(tmp_path: Path) -> None:
    """``--prices`` count alone where there are any, so that nobody ends up with the catalog's median."""
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    one.write_text(f"gpu_canonical_id,usd_per_gpu_hour\n{GPU},0.50\n", encoding="utf-8")
    two.write_text(
        f"gpu_canonical_id,usd_per_gpu_hour,region\n{GPU},0.50,a\n{GPU},0.75,b\n{GPU},9,c\n", encoding="utf-8"
    )
    shipped = {bar.name: bar for bar in sweep(MODEL, gpu=GPU, metric="cost", **RUN).bars}
    assert "offer" in shipped
    alone = {bar.name for bar in sweep(MODEL, gpu=GPU, metric="cost", **RUN, prices=[str(one)]).bars}
    assert "offer" not in alone
    several = {bar.name: bar for bar in sweep(MODEL, gpu=GPU, metric="cost", **RUN, prices=[str(two)]).bars}
    assert several["offer"].high == pytest.approx(1.5 * several["offer"].base)


def test_a_tornado_in_which_nothing_moves_is_still_a_picture(tmp_path: Path) -> None:
    phases = ("load=3", "start=0", "setup=0", "download=0", "save=0")
    found = sweep(MODEL, gpu=GPU, metric="load", **RUN, phase_min=list(phases))
    assert not any(bar.swing > 0 for bar in found.bars)
    assert plot_sweep(found, tmp_path / "still.svg").stat().st_size > 0


def test_a_line_goes_from_left_to_right(tmp_path: Path) -> None:
    from tunecast import sweep_plots

    drawn = []

    def kept(path: Path, series: Any, **_: Any) -> Path:
        drawn.extend(series)
        return path

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sweep_plots, "line_plot", kept)
        plot_sweep(
            sweep(MODEL, gpu=GPU, over=["tokens=1M,10M,5M"], metric="time", **{**RUN, "tokens": None}),
            tmp_path / "l.svg",
        )
    assert list(drawn[0].x) == [1e6, 5e6, 1e7]
    assert list(drawn[0].y) == sorted(drawn[0].y)


@pytest.mark.parametrize("analysis", ["size-steps", "efficiency-steps"])
def test_an_amount_beside_an_analysis_of_steps_is_refused(analysis: str) -> None:
    with pytest.raises(
        InputError, match=rf"--analysis {analysis} goes over numbers of steps, and --tokens says how many"
    ):
        sweep(MODEL, gpu=GPU, analysis=analysis, **RUN)


def test_a_disks_share_is_no_more_than_all_of_it() -> None:
    with pytest.raises(InputError, match="load_efficiency is 2, but it is a share"):
        sweep(MODEL, gpu=GPU, over=["load_efficiency=2", "disk_mb_per_s=500"], metric="load", **RUN)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["sweep", "--csv", "q.svg", "--plot", "q.svg"], "--csv and --plot are both q.svg"),
        (["report", "--out", "x.html", "--markdown", "./x.html"], "--out and --markdown are both x.html"),
        (
            ["recommend", "--write", "trl=r.yaml", "--write", "axolotl=r.yaml"],
            "--write trl and --write axolotl are both",
        ),
    ],
)
def test_two_files_of_one_name_are_refused_before_anything_is_written(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [arguments[0], MODEL, "--method", "qlora", "--tokens", "1M", "--gpu", GPU, *arguments[1:]]
    answer = runner.invoke(program, asked)
    assert answer.exit_code == 2
    assert told in answer.stderr
    assert not list(tmp_path.iterdir())
