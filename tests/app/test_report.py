"""The report: what it says is what the commands say, it stands alone, and it works in a real browser."""

from __future__ import annotations

import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, DRIVER, browser
from typer.testing import CliRunner

import tunecast
from tunecast.cli.program import program

pytest.importorskip("jinja2")

MODEL = "meta-llama/Llama-3.2-1B"
GPUS = ("l40s-48gb", "rtx-4090-24gb", "h100-sxm5-80gb", "rtx-3070-8gb")
ASKED = ["--method", "full", "--max-length", "1024", "--tokens", "2M"]
VOID = {"meta", "input", "br"}
runner = CliRunner()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("report")
    page, text = folder / "page.html", folder / "page.md"
    cards = [word for gpu in GPUS for word in ("--gpu", gpu)]
    done = runner.invoke(program, ["report", MODEL, *ASKED, *cards, "--out", str(page), "--markdown", str(text)])
    assert done.exit_code == 0, done.output
    return page, text


class Outline(HTMLParser):
    """Tags that do not close, ids, and everything that would be fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.fetched: list[str] = []
        self.labelled: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if named.get("id"):
            self.ids[str(named["id"])] += 1
        links = [value for key, value in attrs if key == "href" and not str(value).startswith("#")]
        self.fetched += map(str, [*links, *(value for key, value in attrs if key in ("src", "srcset"))])
        if tag == "svg":
            self.svgs += 1
            assert named["role"] == "img"
        self.labelled += str(named.get("aria-labelledby") or "").split()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(page: Path) -> Outline:
    found = Outline()
    found.feed(page.read_text())
    assert not found.open
    return found


def test_records_may_be_a_folder(tmp_path: Path) -> None:
    """The committed record of a CPU, by its folder."""
    text, records = tmp_path / "page.md", Path(__file__).parents[2] / "results" / "records"
    asked = [
        "report",
        "Qwen/Qwen2.5-0.5B",
        "--method",
        "lora",
        "--max-length",
        "256",
        "--tokens",
        "10k",
        "--gpu",
        "cpu",
    ]
    done = runner.invoke(program, [*asked, "--record", str(records), "--out", str(tmp_path / "page.html"), "--markdown",
                                   str(text)])  # fmt: skip
    assert done.exit_code == 0, done.output
    (record,) = records.glob("cpu_*.json")
    assert record.name in text.read_text()


def test_a_training_file_says_how_much_itself(tmp_path: Path) -> None:
    """Its own steps are an amount; a file without any is refused as a model without one is."""
    file, page = tmp_path / "trl.yaml", tmp_path / "page.html"
    lines = f"model_name_or_path: {MODEL}\ndataset_name: x\ndtype: bfloat16\nmax_length: 512\n"
    file.write_text(lines + "max_steps: 100\n")
    done = runner.invoke(program, ["report", str(file), "--gpu", "l40s-48gb", "--out", str(page)])
    assert done.exit_code == 0, done.output
    assert "100 steps" in page.read_text("utf-8")
    page.unlink()
    file.write_text(lines)
    refused = runner.invoke(program, ["report", str(file), "--gpu", "l40s-48gb", "--out", str(page)])
    assert refused.exit_code == 2
    assert "how much data" in refused.output
    assert not page.exists()


def test_what_fits_nowhere_has_no_time_in_its_answer(tmp_path: Path) -> None:
    """70B in full needs hundreds of GiB: what is needed, of what there is, and the exit code of estimate."""
    text = tmp_path / "page.md"
    asked = ["report", "meta-llama/Llama-3.1-70B", "--method", "full", "--tokens", "1M", "--gpu", "rtx-4090"]
    done = runner.invoke(program, [*asked, "--num-gpus", "1", "--out", str(tmp_path / "page.html"), "--markdown",
                                   str(text)])  # fmt: skip
    assert done.exit_code == 3, done.output
    answer = next(line for line in text.read_text().splitlines() if line.startswith("**"))
    assert re.match(r"\*\*It does not fit 1 x rtx-4090-24gb: [\d.]+ GiB needed a GPU, 23.7 usable; time", answer)
    assert "$" not in answer


def test_the_page_stands_alone_and_names_what_it_shows(files: tuple[Path, Path]) -> None:
    found = outline(files[0])
    assert found.fetched == []
    assert max(found.ids.values()) == 1
    assert set(found.labelled) <= set(found.ids)
    assert found.svgs >= 3 * len(GPUS)
    assert "url(" not in files[0].read_text()
    assert "@import" not in files[0].read_text()


def test_every_card_says_what_estimate_says(files: tuple[Path, Path]) -> None:
    from tunecast.tables import dollars, duration

    page, text = (unescape(path.read_text()) for path in files)
    told = tunecast.estimate(MODEL, gpu=GPUS, method="full", max_length=1024, tokens="2M")
    for forecast in told:
        assert forecast.total_time_h is not None
        cards = text.split("## Every card")[1]
        row = next(line for line in cards.splitlines() if line.startswith(f"| 1 x {forecast.gpu} |"))
        assert duration(forecast.total_time_h.value) in row
        assert f"| {forecast.verdict} |" in row
        assert f"1 x {forecast.gpu}" in page
        if forecast.cost_usd is not None:
            assert dollars(forecast.cost_usd.value) in row
    assert {forecast.verdict for forecast in told} >= {"fits", "no"}


def test_the_answer_is_that_of_recommend(files: tuple[Path, Path]) -> None:
    found = tunecast.recommend(MODEL, gpu=GPUS, method="full", max_length=1024, tokens="2M")
    assert found.cheapest is not None
    best = found.cheapest.forecast
    for path in files:
        first = next(line for line in unescape(path.read_text()).splitlines() if "Cheapest:" in line)
        assert f"{best.run.num_gpus} x {best.gpu} at {best.offer['provider']}" in first  # type: ignore[index]


def test_pictures_sensitivity_and_origins_are_of_the_recommended_plan() -> None:
    from tunecast.report.gather import gather
    from tunecast.report.words import layout, plan_title

    asked = {"method": "full", "max_length": 1024, "tokens": "2M"}
    report = gather(MODEL, command="", gpu=GPUS, **asked)
    best = tunecast.recommend(MODEL, gpu=GPUS, **asked).cheapest
    assert best is not None
    assert report.plan.run == best.forecast.run
    assert report.tornado.base.run == best.forecast.run
    assert report.grid.base.gpu == best.forecast.gpu
    (at_plan,) = [
        point.forecast
        for point in report.grid.points
        if point.forecast is not None and point.forecast.run == best.forecast.run
    ]
    assert at_plan.cost_usd == best.forecast.cost_usd
    assert report.tornado.base.cost_usd.value == pytest.approx(best.forecast.cost_usd.value)  # type: ignore[union-attr]
    assert layout(best.forecast) in plan_title(report)


@pytest.mark.parametrize("times", [0.1, 4.0])
@pytest.mark.parametrize(
    "options",
    [
        {"eval_samples": 1000, "eval_steps": 200},
        {"eval_samples": 20000},
        {"save_steps": 50},
        {"spot": True, "save_steps": 100},
        {"prepare": True, "trials": 2},
    ],
)
def test_another_amount_is_what_is_forecast_for_it(options: dict[str, Any], times: float) -> None:
    """The page's own sum for a tenth and for four times the tokens, against the forecast of that run."""
    from tunecast.report.words import recomputed

    asked: dict[str, Any] = {"gpu": "l40s", "method": "qlora", "max_length": 2048, **options}
    amounts = (200, 200 * times)
    (less,), (more,) = (tunecast.estimate("meta-llama/Llama-3.1-8B", tokens=f"{m}M", **asked) for m in amounts)
    numbers = {name: float(text) for name, text in recomputed(less).items()}
    assert more.total_time_h is not None
    hours = times * numbers["steps-h"] + numbers["other-h"]
    assert hours == pytest.approx(more.total_time_h.value, rel=0.02)
    for end, sign in (("down", -1.0), ("up", 1.0)):
        steps, chance, other = (numbers[f"{part}-h-{end}"] for part in ("steps", "chance", "other"))
        off = np.sqrt((times * steps) ** 2 + times * chance**2 + other**2)
        wanted = more.total_time_h.low if sign < 0 else more.total_time_h.high
        assert hours + sign * off == pytest.approx(wanted, rel=0.1 if "spot" in options else 0.05)


def test_a_recommended_run_in_another_global_batch_says_so(files: tuple[Path, Path]) -> None:
    found = tunecast.recommend(MODEL, gpu=GPUS, method="full", max_length=1024, tokens="2M")
    assert found.batch.samples == 8
    assert found.cheapest is not None
    run = found.cheapest.forecast.run
    for path in files:
        text = unescape(path.read_text())
        assert "Global batch 8: the smallest in which each of 8 GPUs gets a sample; " in text
        assert "tunecast recommend --global-batch N" in text
        assert f"{run.per_device_train_batch_size} x 1024 tokens" in text.split("The recommended run:")[1][:200]
        assert "forecast as asked, in a global batch of 1 (full, micro-batch 1 x 1" in text
        assert found.steps in text


def test_a_recommended_run_in_the_batch_asked_does_not() -> None:
    from tunecast.report.gather import gather
    from tunecast.report.words import run_sentences

    batch = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    report = gather(MODEL, command="", gpu=GPUS[:2], method="full", max_length=1024, tokens="2M", **batch)
    (said,) = run_sentences(report)
    assert "Global batch 8: from" in said


def test_several_gpus_are_part_of_the_global_batch_that_is_recommended_for() -> None:
    from tunecast.report.gather import gather

    asked: dict[str, Any] = {"method": "full", "max_length": 1024, "tokens": "2M", "num_gpus": 16}
    report = gather(MODEL, command="", gpu=GPUS[2], sharding="fsdp", **asked)
    found = tunecast.recommend(MODEL, gpu=GPUS[2], max_gpus=16, **asked)  # a report tries fewer too
    assert report.recommendation is not None
    assert report.recommendation.batch == found.batch
    assert found.batch.samples == 16
    assert report.recommended is not None
    assert found.cheapest is not None
    assert report.recommended.cost_usd == found.cheapest.forecast.cost_usd


def test_the_amount_shown_is_the_one_asked(files: tuple[Path, Path]) -> None:
    (field,) = re.findall(r'id="tokens"[^>]*value="([0-9.]+)"', files[0].read_text())
    assert field == "2000000"


Placed = tuple[float, float, float, float]


def names_in(chart: str) -> dict[str, Placed]:
    """Boxes of a scatter's names, a character taken as 7 wide."""
    found = re.findall(r'<text x="([0-9.]+)" y="([0-9.]+)" text-anchor="start" class="name">([^<]+)<', chart)
    return {words: (float(x), float(y) - 10, float(x) + 7 * len(words), float(y)) for x, y, words in found}


@pytest.mark.parametrize("width", [720, 340])
def test_named_plans_have_names_inside_the_picture_that_cover_no_other(width: float) -> None:
    from tunecast.report.svg import Dot, scatter

    near = [(0.76, 1.23, "cheapest"), (0.4, 1.33, ""), (0.4, 1.74, ""), (0.26, 1.9, "balance"), (0.25, 2.0, ""),
            (0.25, 2.2, ""), (0.18, 2.8, ""), (0.15, 4.7, "fastest")]  # fmt: skip
    dots = [Dot(name="4 x a100-sxm4-80gb", x=x, y=y, told="", front=True, mark=mark) for x, y, mark in near]
    chart = scatter(dots, width=width, x_label="h", y_label="USD", title="t", name="n")
    names = names_in(chart)
    assert {words.split(":")[0] for words in names if ":" in words} == {"cheapest", "balance", "fastest"}
    boxes = list(names.values())
    assert all(box[0] >= 0 and box[2] <= width for box in boxes)
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def test_without_a_recommendation_they_are_of_the_card_as_asked() -> None:
    from tunecast.report.gather import gather
    from tunecast.report.words import plan_title

    report = gather(MODEL, command="", gpu="mock:l40s-48gb", method="full", max_length=1024, tokens="2M")
    assert report.recommended is None
    assert report.plan is report.best
    assert plan_title(report).startswith("1 x mock:l40s-48gb#0 as asked: full, micro-batch 1 x 1")


def luminance(colour: str) -> float:
    """Relative luminance of ``#rgb`` or ``#rrggbb`` (WCAG 2.1)."""
    digits = colour.lstrip("#")
    digits = "".join(c * 2 for c in digits) if len(digits) == 3 else digits
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_are_readable_in_light_and_dark(files: tuple[Path, Path]) -> None:
    page = files[0].read_text()
    blocks = page.split("prefers-color-scheme: dark")[:2]
    light, dark = (dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{3,6})", block)) for block in blocks)
    for colours in (light, {**light, **dark}):
        for name in ("fg", "dim", "blue", "orange", "good", "bad"):
            assert contrast(colours[name], colours["bg"]) >= 4.5, name
        assert contrast(colours["fg"], colours["soft"]) >= 7
        for index in range(10):
            assert contrast(colours[f"p{index}"], colours["bg"]) >= 3, index
    for cell in re.findall(r'class="cell" style="background:(#[0-9a-f]{6})"', page):
        assert contrast("#111111", cell) >= 4.5


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--method", "lora"], "add --tokens 10M"),
        ([*ASKED, "--out", "report.pdf"], "is no page"),
        ([*ASKED, "--out", "/no/such/folder/report.html"], "there is no folder"),
        ([*ASKED, "--gpu", "nonsense"], "nonsense"),
    ],
)
def test_what_cannot_be_reported_is_refused_and_nothing_written(
    asked: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(program, ["report", MODEL, *asked])
    assert list(tmp_path.iterdir()) == []
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


TOUCH = """
var out = {}, table = document.getElementById("table");
var rows = function () { return Array.from(table.tBodies[0].rows); };
var speeds = function () { return rows().map(function (r) { return parseFloat(r.cells[4].dataset.v); }); };
var cell = function (i, k) { return parseFloat(rows()[0].querySelector(k).dataset.v); };
var span = function (k) { return rows()[0].querySelector(k + " small").textContent; };
table.tHead.rows[0].cells[4].querySelector("button").click(); out.up = speeds();
table.tHead.rows[0].cells[4].querySelector("button").click(); out.down = speeds();
out.sorted = table.tHead.rows[0].cells[4].getAttribute("aria-sort");
var first = rows()[0], tokens = document.getElementById("tokens"), price = document.getElementById("price");
out.before = cell(0, ".time"); out.train = parseFloat(first.dataset.stepsH);
tokens.value = parseFloat(tokens.value) * 3; tokens.dispatchEvent(new Event("change")); out.tripled = cell(0, ".time");
out.name = first.cells[0].textContent; out.timeSpan = span(".time"); out.costSpan = span(".cost");
price.value = 2; price.dispatchEvent(new Event("change")); out.cost = cell(0, ".cost"); out.ownSpan = span(".cost");
out.told = !document.getElementById("changed").hidden;
var wrong = function (field, text) {
  var old = field.value; field.value = text; field.dispatchEvent(new Event("input"));
  var said = document.getElementById("changed").textContent; field.value = old;
  field.dispatchEvent(new Event("input")); return said;
};
out.noTokens = wrong(tokens, "-5"); out.noPrice = wrong(price, "-5");
tokens.value = parseFloat(tokens.value) / 3; price.value = ""; price.dispatchEvent(new Event("change"));
out.restored = cell(0, ".time"); out.quiet = document.getElementById("changed").hidden;
var card = document.getElementById("card");
out.opened = Array.from(document.querySelectorAll("details[id^=card-][open]")).map(function (d) { return d.id; });
card.selectedIndex = 2; card.dispatchEvent(new Event("change"));
out.open = Array.from(document.querySelectorAll("details[id^=card-][open]")).map(function (d) { return d.id; });
var seen = function (e) { var b = e.getBoundingClientRect(); return b.width > 0 && b.right > window.innerWidth + 1; };
var shown = "table.cards td, table.cards th, details[open] svg text, #h-money ~ figure svg text";
out.cut = Array.from(document.querySelectorAll(shown)).filter(seen).map(function (e) { return e.textContent; });
out.chosen = card.value; out.wide = document.documentElement.scrollWidth - window.innerWidth;
out.first = document.querySelector("a, button, input, select").className;
return out;
"""


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium with ChromeDriver on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser_it_sorts_recomputes_and_fits_the_screen(files: tuple[Path, Path], width: int) -> None:
    from tunecast.tables import duration

    with browser(width) as session:
        session.open(files[0].as_uri())
        out = session.run(TOUCH)
        assert session.errors() == []
    assert out["up"] == sorted(out["up"])
    assert out["down"] == sorted(out["up"], reverse=True)
    assert out["sorted"] == "descending"
    assert out["tripled"] - out["before"] == pytest.approx(2 * out["train"])
    assert out["cost"] == pytest.approx(2 * out["tripled"])
    assert out["restored"] == pytest.approx(out["before"])
    assert out["told"]
    assert out["noTokens"].startswith("Give more than 0 tokens")
    assert out["noPrice"].startswith("Give a price of 0 or more")
    assert out["cut"] == []
    assert out["quiet"]
    assert out["opened"] == ["card-recommended"]
    assert out["open"] == [out["chosen"]]
    assert out["wide"] <= 0
    assert out["first"] == "skip"
    (told,) = tunecast.estimate(MODEL, gpu=out["name"].split(" x ")[1], method="full", max_length=1024, tokens="6M")
    for end, shown in zip((told.total_time_h.low, told.total_time_h.high), out["timeSpan"].split(" to "), strict=True):
        number, unit = duration(end).split()
        assert shown.endswith(unit)
        assert float(shown.removesuffix(unit)) == pytest.approx(float(number), rel=2e-3)  # the last step is not full


@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium with ChromeDriver on this machine")
def test_without_script_everything_is_there(files: tuple[Path, Path], tmp_path: Path) -> None:
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r"<script>.*?</script>", "", files[0].read_text(), flags=re.DOTALL))
    with browser() as session:
        session.open(bare.as_uri())
        assert session.run("return document.getElementById('controls').hidden")
        shown = session.run("return document.body.textContent")
    for gpu in GPUS:
        assert f"1 x {gpu}" in shown
