"""From a factor set's memory terms to the overheads that the memory model adds."""

from __future__ import annotations

from tunecast.model.factors import FactorSet
from tunecast.model.memory import MemoryOverheads
from tunecast.model.value import Value


def overheads_from_factors(factors: FactorSet) -> MemoryOverheads | None:
    """Fragmentation, with and without a replay, and context; None when the factors hold no reading of the process."""
    terms = factors.memory_overhead_bytes
    if "context" not in terms:
        return None
    return MemoryOverheads(
        fragmentation_frac=_bounded(terms, "fragmentation_frac"),
        context_bytes=_bounded(terms, "context"),
        replayed_frac=_bounded(terms, "replayed_frac") if "replayed_frac" in terms else None,
    )


def _bounded(terms: dict[str, float], name: str) -> Value:
    """A term with its 80% bounds; absent is none (a CPU has no caching allocator)."""
    value = terms.get(name, 0.0)
    return Value(value=value, low=terms.get(f"{name}_low", value), high=terms.get(f"{name}_high", value))
