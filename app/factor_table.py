"""``tunecast fit`` for people: what the fit found and how well it explains what it did not see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunecast.model.units import GIGA, MICROSECOND_S, TERA
from tunecast.tables import digits, keep_whole, plain_table

if TYPE_CHECKING:
    from rich.table import Table

    from tunecast.model.factors import FactorSet

DISPLAY_UNITS = {
    "FLOP/s": (TERA, "TFLOP/s"),
    "B/s": (GIGA, "GB/s"),
    "s": (MICROSECOND_S, "µs"),
    "elements/s": (GIGA, "G elements/s"),
}
"""Units of factors, and what people read instead."""


def factor_table(factors: FactorSet) -> Table:
    """Curves with their left-out spread, factors with their 80% interval."""
    table = plain_table("factor", "value", "80% interval", "unit", title=f"{factors.gpu}: fitted", right=("value",))
    for name, curve in sorted(factors.curves.items()):
        table.add_row(f"curve {name}", curve.form, f"±{curve.log_sd:.1%} left out (sd)", "")
    for name, factor in sorted(factors.factors.items()):
        size, unit = DISPLAY_UNITS.get(factor.unit, (1.0, factor.unit))
        value, low, high = (digits(end / size) for end in (factor.value, factor.low, factor.high))
        table.add_row(name, value, f"{low}–{high}", "" if unit == "1" else unit)
    table.caption = f"whole steps left out of the fit: ±{factors.step_log_sd:.1%} (sd)"
    table.caption_justify = "left"
    return keep_whole(table)
