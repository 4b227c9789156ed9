"""The answer as HTML: the table of forecasts, and what the report draws of the best card."""

from __future__ import annotations

import tempfile
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tunecast.catalogs.confined import confined_to
from tunecast.catalogs.errors import InputError, TunecastError
from tunecast.forecasts import Forecasts
from tunecast.web.asked import Fields, command, gpus_of, link, model_of, options

if TYPE_CHECKING:
    from tunecast.model.forecast import Forecast

PASTED = "The pasted file"
FIX = "would make it fit"
"""In the notes of a forecast that does not fit (`model.fitting`)."""
NO_FIX = "No single change that was tried makes it fit: choose larger cards, more of them, or a smaller model."

STYLE = """<style>
.tc svg { width: 100%; max-width: 760px; height: auto; font: 12.5px sans-serif; fill: currentColor; }
.tc .at-narrow { display: none; }
.tc .tick { font-size: 11.5px; } .tc .limit { stroke: currentColor; stroke-width: 2; }
.tc .p0 { fill: #2b6cb0; } .tc .p1 { fill: #b7791f; } .tc .p2 { fill: #2f855a; } .tc .p3 { fill: #97266d; }
.tc .p4 { fill: #0987a0; } .tc .p5 { fill: #9c4221; } .tc .p6 { fill: #553c9a; } .tc .p7 { fill: #718096; }
.tc .p8 { fill: #d53f8c; } .tc .p9 { fill: #5a7d1e; }
.tc table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .84rem; line-height: 1.35; }
.tc td, .tc th { padding: .2rem .5rem !important; white-space: nowrap; vertical-align: top; }
.tc table, .tc tr { border: 0 !important; } .tc td, .tc th { border-width: 0 0 1px !important; }
.tc td:last-child { white-space: normal; } .tc .scroll { overflow-x: auto; }
.tc .error { border-left: 4px solid #b7471d; padding: .6rem 1rem; }
@media screen and (max-width: 46rem) {
  .tc .at-wide, .tc thead { display: none !important; } .tc .at-narrow { display: block; }
  .tc table, .tc tbody { display: block; }
  .tc tr { display: grid; grid-template-columns: 1fr 1fr 1fr; padding: .4rem 0; border-bottom: 1px solid !important; }
  .tc td { border: 0 !important; padding: .1rem .3rem !important; text-align: left !important; white-space: normal; }
  .tc td::before { content: attr(data-l); display: block; opacity: .7; font-size: .75rem; }
  .tc td:first-child { grid-column: 1 / 3; font-weight: 600; } .tc td:first-child::before { content: none; }
  .tc td:last-child { grid-column: 1 / -1; }
}
</style>"""


def answer(asked: Fields) -> tuple[str, str, str]:
    """(HTML, link, command). What cannot be answered is one sentence in the HTML, as on the command line."""
    try:
        how, found = command(asked), forecasts(asked)
    except TunecastError as error:
        return refused(error), "", ""
    return f'{STYLE}<div class="tc">{shown(found)}</div>', link_or_why_not(asked), how


def refused(error: TunecastError) -> str:
    """The one sentence of an error, as the page shows it."""
    return f'{STYLE}<div class="tc"><p class="error" role="alert">{escape(str(error))}</p></div>'


def link_or_why_not(asked: Fields) -> str:
    """The link, or the sentence that says why there is none."""
    try:
        return link(asked)
    except InputError as error:
        return str(error)


def forecasts(asked: Fields) -> Forecasts:
    """What `tunecast.estimate` says, best first. Raises TunecastError as it does."""
    from tunecast.api import estimate
    from tunecast.forecast_table import best_first

    if not asked.config.strip():
        return Forecasts(best_first(estimate(model_of(asked), gpu=gpus_of(asked), **options(asked))))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="tunecast-web-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(asked.config, encoding="utf-8")
        try:
            with confined_to(Path(folder)):
                return Forecasts(best_first(estimate(str(path), gpu=gpus_of(asked), **options(asked))))  # type: ignore[arg-type]
        except TunecastError as error:
            raise InputError(of_pasted(error, path)) from error


def of_pasted(error: TunecastError, path: Path) -> str:
    """An error about the file that the page wrote, in words about what the visitor pasted."""
    mark = getattr(error.__cause__, "problem_mark", None)
    if mark is not None:
        problem = getattr(error.__cause__, "problem", None) or "cannot be read"
        return f"{PASTED}, line {mark.line + 1}, is no valid YAML: {problem}."
    words = str(error).replace(str(path), PASTED)
    return PASTED + words.removeprefix(path.name) if words.startswith(path.name) else words


def shown(found: Forecasts) -> str:
    """The best card in one sentence and in charts, then every card."""
    from tunecast.report.charts import memory_bar, operations_bars

    best = pictured(found)
    return (
        f"{headline(found)}"
        f"<h4>Memory of {escape(best.gpu)}, GiB; peak at: {escape(best.memory.peak_moment)}</h4>"
        f'<div class="scroll">{memory_bar(best)}</div>'
        f"<h4>One optimizer step, bound by {escape(best.bound_by)}</h4>"
        f'<div class="scroll">{operations_bars(best)}</div>'
        f'<h4>Every card</h4><div class="scroll">{found._repr_html_()}</div>'
    )


def per_token_words(forecast: Forecast) -> str:
    """What a million tokens cost, where no amount is known."""
    from tunecast.tables import dollars, seconds

    cost = forecast.cost_per_million_tokens_usd
    if forecast.total_time_h is not None or cost is None:
        return ""
    step = f", {seconds(forecast.step_time_s.value)} a step"
    return f"{step}, {dollars(cost.value)} per million tokens; say the tokens of the run for its time and cost"


def pictured(found: Forecasts) -> Forecast:
    """The best card; where the run fits none, the one that it is told for what would make it fit."""
    return next((one for one in found if found[0].verdict == "no" and fixes_of(one)), found[0])


def fixes_of(forecast: Forecast) -> list[str]:
    """The forecast's own notes of what would make the run fit."""
    return [note for note in forecast.notes if FIX in note]


def headline(found: Forecasts) -> str:
    """Whether it fits, before anything else; time and money of what does not fit are said to be as if it did."""
    from tunecast.report.charts import plan_name
    from tunecast.report.words import VERDICT_WORDS, plan_words
    from tunecast.tables import gib_text

    best = pictured(found)
    if best.verdict != "no":
        fits = VERDICT_WORDS.get(best.verdict or "", "Perhaps it fits")
        return f"<h3>{fits}: {escape(plan_words(best))}{escape(per_token_words(best))}</h3>"
    needed = best.memory.process_bytes or best.memory.allocated_bytes
    whole = "" if len(found) == 1 else f" any of these {len(found)} cards"
    said = f"{plan_name(best)} needs {gib_text(needed.value)} of {gib_text(best.memory.usable_bytes)} GiB"
    fixes = "".join(f"<li>{escape(note)}</li>" for note in fixes_of(best))
    changes = f"<p>What would make it fit:</p><ul>{fixes}</ul>" if fixes else f"<p>{NO_FIX}</p>"
    if_it_did = f"<p>As if memory sufficed: {escape(plan_words(best))}.</p>"
    return f"<h3>It does not fit{whole}: {escape(said)}</h3>{changes}{if_it_did}"
