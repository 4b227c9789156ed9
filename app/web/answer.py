"""The answer as HTML: the table of forecasts, and what the report draws of the best card."""

from __future__ import annotations

import tempfile
from html import escape
from pathlib import Path

from tunecast.catalogs.errors import TunecastError
from tunecast.forecasts import Forecasts
from tunecast.web.asked import Fields, command, gpus_of, link, model_of, options

STYLE = """<style>
.tc svg { width: 100%; min-width: 640px; max-width: 760px; height: auto; font: 12.5px sans-serif; fill: currentColor; }
.tc .tick { font-size: 11.5px; } .tc .limit { stroke: currentColor; stroke-width: 2; }
.tc .p0 { fill: #2b6cb0; } .tc .p1 { fill: #b7791f; } .tc .p2 { fill: #2f855a; } .tc .p3 { fill: #97266d; }
.tc .p4 { fill: #0987a0; } .tc .p5 { fill: #9c4221; } .tc .p6 { fill: #553c9a; } .tc .p7 { fill: #718096; }
.tc .p8 { fill: #d53f8c; } .tc .p9 { fill: #5a7d1e; }
.tc table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .tc td, .tc th { padding: .25rem .6rem; }
.tc .scroll { overflow-x: auto; } .tc td:first-child { white-space: nowrap; }
.tc .error { border-left: 4px solid #b7471d; padding: .6rem 1rem; }
</style>"""


def answer(asked: Fields) -> tuple[str, str, str]:
    """(HTML, link, command). What cannot be answered is one sentence in the HTML, as on the command line."""
    try:
        said, how, found = link(asked), command(asked), forecasts(asked)
    except TunecastError as error:
        return f'{STYLE}<div class="tc"><p class="error" role="alert">{escape(str(error))}</p></div>', "", ""
    return f'{STYLE}<div class="tc">{shown(found)}</div>', said, how


def forecasts(asked: Fields) -> Forecasts:
    """What `tunecast.estimate` says, best first. Raises TunecastError as it does."""
    from tunecast.api import estimate
    from tunecast.forecast_table import best_first

    if not asked.config.strip():
        return Forecasts(best_first(estimate(model_of(asked), gpu=gpus_of(asked), **options(asked))))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="tunecast-web-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(asked.config, encoding="utf-8")
        return Forecasts(best_first(estimate(str(path), gpu=gpus_of(asked), **options(asked))))  # type: ignore[arg-type]


def shown(found: Forecasts) -> str:
    """The best card in one sentence and in charts, then every card."""
    from tunecast.report.charts import memory_bar, operations_bars
    from tunecast.report.words import VERDICT_WORDS, plan_words

    best = found[0]
    fits = VERDICT_WORDS.get(best.verdict or "", "Perhaps it fits")
    return (
        f"<h3>{fits}: {escape(plan_words(best))}</h3>"
        f"<h4>Memory of {escape(best.gpu)}, GiB; peak at: {escape(best.memory.peak_moment)}</h4>"
        f'<div class="scroll">{memory_bar(best)}</div>'
        f"<h4>One optimizer step, bound by {escape(best.bound_by)}</h4>"
        f'<div class="scroll">{operations_bars(best)}</div>'
        f'<h4>Every card</h4><div class="scroll">{found._repr_html_()}</div>'
    )
