"""A price book: the user's own prices over refreshed ones over the shipped snapshot, and what a job pays.

Within one layer the newest row of an offer is its price (`catalogs.prices`). Between layers the upper one
wins: the user's row replaces the same offer below it, and a refreshed provider replaces that provider's
older rows of the same purchase kind, so that a listing which has gone is not quoted any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tunecast.catalogs.errors import UnknownNameError
from tunecast.catalogs.prices import (
    PRICE_TYPES,
    JobOffer,
    Offer,
    cheapest_first,
    check_request,
    current_offers,
    gpu_families,
    job_offer,
    load_prices,
)

if TYPE_CHECKING:
    from tunecast.catalogs.price_cache import CachedPrices

CONTRACT_KINDS = ("reserved", "committed")
"""Purchase kinds of a user's own file that count as on-demand does: giving the file is asking for them."""
MOST_TOLD = 600
"""Letters of the names of regions that a sentence lists at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceBook:
    """Every price that was read, and among them the one that counts for each offer."""

    offers: tuple[Offer, ...]
    """All rows, history included."""
    sources: tuple[str, ...]
    """Where the rows come from, uppermost layer first."""
    current: tuple[Offer, ...] = field(repr=False)
    """The row that counts for each offer."""
    by_gpu: dict[str, tuple[Offer, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        grouped: dict[str, list[Offer]] = {}
        for offer in self.current:
            grouped.setdefault(offer.gpu_id, []).append(offer)
        object.__setattr__(self, "by_gpu", {gpu_id: tuple(rows) for gpu_id, rows in grouped.items()})

    @property
    def providers(self) -> tuple[str, ...]:
        """Every provider with a current offer, by name."""
        return tuple(sorted({offer.provider for offer in self.current}))

    @property
    def regions(self) -> tuple[str, ...]:
        """Every region with a current offer, by name; `global` where the listing names none."""
        return tuple(sorted({offer.region for offer in self.current}))

    def offers_for(
        self,
        gpu_id: str,
        num_gpus: int = 1,
        price_types: Sequence[str] = ("on-demand",),
        providers: Sequence[str] | None = None,
        regions: Sequence[str] | None = None,
    ) -> tuple[JobOffer, ...]:
        """Current offers that may be ranked, for a job of `num_gpus` of this GPU, cheapest whole job first.

        Reserved and committed rows of the user's own file count wherever on-demand does. A region is a
        name or its beginning (`us` is every `us-...`). Raises UnknownNameError for a provider or region
        that no offer of the book has.
        """
        check_request(num_gpus, price_types)
        self._check_places(providers, regions)
        return cheapest_first(
            job_offer(offer, num_gpus)
            for offer in self.by_gpu.get(gpu_id, ())
            if offer.rankable and _kind_wanted(offer, price_types) and _place_wanted(offer, providers, regions)
        )

    def unranked_offers_for(
        self, gpu_id: str, num_gpus: int = 1, price_types: Sequence[str] = PRICE_TYPES
    ) -> tuple[JobOffer, ...]:
        """Current offers that are shown and never ranked, those of an ambiguous family included."""
        check_request(num_gpus, price_types)
        ids = [gpu_id, *(family for family, members in gpu_families().items() if gpu_id in members)]
        shown = (offer for i in ids for offer in self.by_gpu.get(i, ()))
        return cheapest_first(job_offer(o, num_gpus) for o in shown if o.price_type in price_types and not o.rankable)

    def history(self, offer: Offer) -> tuple[Offer, ...]:
        """All rows of one offer, oldest first."""
        return tuple(sorted((o for o in self.offers if o.key == offer.key), key=lambda o: o.snapshot_date))

    def _check_places(self, providers: Sequence[str] | None, regions: Sequence[str] | None) -> None:
        for name in providers or ():
            if name.lower() not in self.providers:
                raise UnknownNameError("provider", name, self.providers, hint=f"There are {', '.join(self.providers)}.")
        for name in regions or ():
            if not any(_region_matches(name, known) for known in self.regions):
                every = ", ".join(self.regions)
                hint = f"There are {every}." if len(every) < MOST_TOLD else "`tunecast catalog prices` lists them."
                raise UnknownNameError("region", name, self.regions, hint=hint)


def _kind_wanted(offer: Offer, price_types: Sequence[str]) -> bool:
    contract = offer.layer == "user" and offer.price_type in CONTRACT_KINDS and "on-demand" in price_types
    return contract or offer.price_type in price_types


def _place_wanted(offer: Offer, providers: Sequence[str] | None, regions: Sequence[str] | None) -> bool:
    by_provider = providers is None or offer.provider in {name.lower() for name in providers}
    return by_provider and (regions is None or any(_region_matches(name, offer.region) for name in regions))


def _region_matches(asked: str, region: str) -> bool:
    return region.lower().startswith(asked.lower())


@cache
def shipped_book() -> PriceBook:
    """The snapshot that ships with tunecast, alone."""
    return book_of(load_prices())


def book_of(offers: Iterable[Offer], sources: Sequence[str] = ("shipped snapshot",)) -> PriceBook:
    """A book of one layer."""
    rows = tuple(offers)
    return PriceBook(offers=rows, sources=tuple(sources), current=current_offers(rows))


def refreshed_book(cached: CachedPrices) -> PriceBook:
    """The book of a refresh: of each provider only the newest list counts, so what has gone from it is history."""
    offers, newest = cached.offers, dict[str, str]()
    for offer in offers:
        newest[offer.provider] = max(newest.get(offer.provider, ""), offer.snapshot_date)
    listed = tuple(offer for offer in offers if offer.snapshot_date == newest[offer.provider])
    return PriceBook(offers=offers, sources=(cached.source,), current=current_offers(listed))


def layered(upper: PriceBook, lower: PriceBook, *, whole_providers: bool) -> PriceBook:
    """Both books, the upper one's offers counting before the lower one's.

    `whole_providers`: the upper book is a provider's whole list of a purchase kind, so that what it leaves
    out is not offered any more; otherwise it replaces only the same offers. Rows that are newer than the
    upper list stay, and so does a card that the upper list names only by its family.
    """
    gone = _delisted(upper) if whole_providers else _replaced(upper)
    kept = tuple(offer for offer in lower.current if not gone(offer))
    return PriceBook(
        offers=(*upper.offers, *lower.offers), sources=(*upper.sources, *lower.sources), current=(*upper.current, *kept)
    )


def _replaced(upper: PriceBook) -> Callable[[Offer], bool]:
    """Whether an offer is in the upper book too."""
    keys = {offer.key for offer in upper.current}
    return lambda offer: offer.key in keys


def _delisted(upper: PriceBook) -> Callable[[Offer], bool]:
    """Whether an offer's provider lists its purchase kind in the upper book, as new or newer."""
    days: dict[tuple[str, str], str] = {}
    vague: set[tuple[str, str, str]] = set()
    for o in upper.current:
        days[o.provider, o.price_type] = max(days.get((o.provider, o.price_type), ""), o.snapshot_date)
        vague |= {(o.provider, o.price_type, member) for member in gpu_families().get(o.gpu_id, ())}

    def gone(offer: Offer) -> bool:
        place = (offer.provider, offer.price_type)
        resold = offer.tier.startswith("via ")
        return offer.snapshot_date <= days.get(place, "") and not resold and (*place, offer.gpu_id) not in vague

    return gone


def price_book(files: Sequence[str | Path] = (), cache_dir: Path | None = None) -> PriceBook:
    """The user's `files` over the refreshed cache (in `cache_dir`, by default the user's) over the shipped snapshot."""
    from tunecast.catalogs.price_cache import cached_offers
    from tunecast.catalogs.price_file import read_price_file

    book = shipped_book()
    refreshed = cached_offers(cache_dir)
    if refreshed is not None:
        book = layered(refreshed_book(refreshed), book, whole_providers=True)
    for file in reversed(files):
        book = layered(book_of(read_price_file(Path(file)), (str(file),)), book, whole_providers=False)
    return book
