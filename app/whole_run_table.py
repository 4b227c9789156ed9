"""The whole run for people: its phases, what its cost is made of, and what interruptions make of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tunecast.tables import DASH, digits, dollars, duration

if TYPE_CHECKING:
    from tunecast.model.interrupted import Interrupted
    from tunecast.model.phase import Phase
    from tunecast.model.whole_run import WholeRun

Line = tuple[str, str, str]
PART_WORDS = {"other_machines": "other machines"}
SMALLEST_SHOWN_USD = 0.005
"""Parts of the cost that would print as $0.00 are left to the JSON."""


def phase_rows(whole: WholeRun) -> Iterable[Line]:
    """Every phase with its length, what it does, and where that comes from."""
    for phase in whole.phases:
        yield f"  {phase.name}", duration(phase.hours.value), phase_words(phase)


def phase_words(phase: Phase) -> str:
    """What is done, the origin unless it is the forecast itself, and the other machine's price."""
    origin = "" if phase.origin == "forecast" else "given" if phase.origin == "cli" else phase.origin.split(":")[0]
    elsewhere = "" if phase.usd_per_h is None else f"at {dollars(phase.usd_per_h)}/h"
    return ", ".join(word for word in (phase.how, origin, elsewhere) if word)


def cost_rows(whole: WholeRun) -> Iterable[Line]:
    """The parts of the cost where there is more than one, and the electricity of a machine of one's own."""
    parts = {name: usd for name, usd in whole.cost_parts_usd.items() if usd >= SMALLEST_SHOWN_USD}
    paid = paid_words(whole)
    if len(parts) > 1 or paid:
        for name, usd in parts.items():
            yield f"  {PART_WORDS.get(name, name)}", dollars(usd), paid if name == "rent" else ""
    if whole.energy_kwh is not None and whole.power is not None:
        yield "energy, kWh", digits(whole.energy_kwh), whole.power.how


def paid_words(whole: WholeRun) -> str:
    """Hours that are paid where rounding makes them longer than the run."""
    held = sum(phase.hours.value for phase in whole.phases if phase.usd_per_h is None)
    if whole.billed_h is None or whole.billed_h <= held * 1.01:
        return ""
    return f"{duration(whole.billed_h)} are paid"


def interruption_rows(whole: WholeRun) -> Iterable[Line]:
    """Expected cuts, the distribution, and the point where on-demand becomes cheaper."""
    found = whole.interruptions
    if found is None:
        return
    share, origin = found.cuts.monthly, "given" if found.cuts.origin == "cli" else found.cuts.origin
    between = f"{share.low:.0%}" if share.low == share.high else f"{share.low:.0%}–{share.high:.0%}"
    yield (
        "interruptions expected",
        digits(found.expected_interruptions),
        f"{between} of machines a month, {origin}",
    )
    yield "  checkpoint every", DASH if found.interval_min is None else duration(found.interval_min / 60), words(found)
    percentiles = found.percentiles_h(whole.seed)
    if percentiles is not None:
        low, middle, high = percentiles
        yield "  time, median", duration(middle), f"10th to 90th percentile {duration(low)}–{duration(high)}"
    if found.on_demand_usd is not None:
        yield "on demand instead", dollars(found.on_demand_usd), break_even(found)


def words(found: Interrupted) -> str:
    """Who chose the interval, and what one save and one restart take."""
    chosen = "proposed by Daly's formula" if found.proposed and found.interval_min else ""
    saves = f"save {duration(found.job.save_h)}, restart {duration(found.job.restart_h)}"
    return ", ".join(part for part in (chosen, saves) if part)


def break_even(found: Interrupted) -> str:
    """From which interruption rate, and from which price, on-demand is cheaper."""
    rate, price = found.break_even_per_h(), found.break_even_usd_per_h()
    if price is None:
        return ""
    above = f"cheaper if interruptible costs above {dollars(price)}/h"
    return above if rate is None else f"{above}, or from an interruption every {duration(1.0 / rate)}"


def train_line(whole: WholeRun | None) -> str:
    """Training alone, under the time of the whole run."""
    return "" if whole is None else f"train {duration(whole.train_time_h.value)}"
