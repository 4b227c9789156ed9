"""A user's own prices: what a file may say, and that every bad cell is named by file, line and column."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tunecast.catalogs.errors import InputError
from tunecast.catalogs.price_book import price_book
from tunecast.catalogs.price_file import read_price_file
from tunecast.catalogs.tables import price_rows

HEADER = "provider,gpu_canonical_id,gpu_count,price_type,usd_per_hour,usd_per_gpu_hour,term_months,upfront_usd"
GOOD = "mine,a100-sxm4-80gb,8,committed,12,1.5,6,"


def written(tmp_path: Path, *lines: str, header: str = HEADER) -> Path:
    path = tmp_path / "contract.csv"
    path.write_text("\n".join((header, *lines)) + "\n", encoding="utf-8")
    return path


def test_a_contract_becomes_an_offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795132800")
    (offer,) = read_price_file(written(tmp_path, GOOD))
    assert (offer.provider, offer.gpu_id, offer.gpu_count, offer.price_type) == (
        "mine",
        "a100-sxm4-80gb",
        8,
        "committed",
    )
    assert (offer.usd_per_hour, offer.usd_per_gpu_hour, offer.term_months, offer.layer) == (12.0, 1.5, 6.0, "user")
    assert (offer.snapshot_date, offer.source, offer.region) == ("2026-11-20", "contract.csv", "global")


@pytest.mark.parametrize(
    ("header", "line", "per_gpu"),
    [
        ("gpu_canonical_id,usd_per_gpu_hour", "A10G,1.006", 1.006),
        ("gpu_canonical_id,gpu_count,usd_per_hour", "NVIDIA A10G,4,5.672", 1.418),
        ("gpu_canonical_id,gpu_count,instance_gpus,usd_per_gpu_hour", "a10g-24gb,1,8,2", 2.0),
    ],
)
def test_two_columns_are_enough_and_any_name_of_the_gpu_will_do(
    tmp_path: Path, header: str, line: str, per_gpu: float
) -> None:
    (offer,) = read_price_file(written(tmp_path, line, header=header))
    assert (offer.provider, offer.gpu_id, offer.price_type) == ("user", "a10g-24gb", "on-demand")
    assert offer.usd_per_gpu_hour == pytest.approx(per_gpu)
    assert offer.usd_per_hour == pytest.approx(per_gpu * offer.gpu_count)


def test_what_the_catalog_prints_can_be_read_back(tmp_path: Path) -> None:
    shipped = [row for row in price_rows(current_only=True) if row["rankable"]][:40]
    path = tmp_path / "all.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(shipped[0]))
        writer.writeheader()
        writer.writerows(json.loads(json.dumps(shipped)))
    read = read_price_file(path)
    assert [(o.provider, o.gpu_id, o.usd_per_gpu_hour) for o in read] == [
        (row["provider"], row["gpu_canonical_id"], pytest.approx(row["usd_per_gpu_hour"], rel=0.01)) for row in shipped
    ]


BAD: list[tuple[str, str, str]] = [
    ("column", GOOD.replace("a100-sxm4-80gb", ""), "'gpu_canonical_id' is empty"),
    ("gpu", GOOD.replace("a100-sxm4-80gb", "a100"), "'gpu_canonical_id' names no GPU: GPU 'a100' is ambiguous"),
    ("gpu", GOOD.replace("a100-sxm4-80gb", "b9000"), "'gpu_canonical_id' names no GPU: Unknown GPU"),
    ("count", GOOD.replace(",8,", ",eight,"), "'gpu_count' is 'eight', not a number"),
    ("count", GOOD.replace(",8,", ",1.5,"), "'gpu_count' is 1.5, not a whole number"),
    ("count", GOOD.replace(",8,", ",0,"), "'gpu_count' is 0, which is not above 0"),
    ("kind", GOOD.replace("committed", "handshake"), "'price_type' is 'handshake'; use one of on-demand, spot"),
    ("price", GOOD.replace("12,1.5", ",-1"), "'usd_per_gpu_hour' is -1, which is not above 0"),
    ("price", GOOD.replace("12,1.5", ","), "'usd_per_gpu_hour' is empty"),
    ("price", GOOD.replace("12,1.5", "nan,"), "'usd_per_hour' is 'nan', not a number"),
    ("price", GOOD.replace("12,1.5", "13,1.5"), "'usd_per_hour' is 13, but 8 x 1.5 per GPU is not that"),
    ("term", GOOD.replace("6,", ","), "'term_months' is empty, but price_type committed binds"),
    ("term", GOOD.replace("committed", "on-demand").replace(",6,", ",,100"), "'term_months' is empty, but an upfront"),
    ("upfront", GOOD + "-5", "'upfront_usd' is -5, which is not 0 or above"),
    ("cells", GOOD + ",1,2", "'9' is beyond the header's last column"),
]


@pytest.mark.parametrize(("_what", "line", "message"), BAD)
def test_a_bad_cell_is_refused_by_file_line_and_column(tmp_path: Path, _what: str, line: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        read_price_file(written(tmp_path, GOOD, line))
    assert str(refused.value).startswith(f"{tmp_path / 'contract.csv'}, line 3, column {message}")
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize(
    ("header", "line", "message"),
    [
        (HEADER + ",snapshot_date", GOOD + ",2026-13", "line 2, column 'snapshot_date' is '2026-13', not a day"),
        (HEADER + ",instance_gpus", GOOD + ",12", "line 2, column 'instance_gpus' is 12, which is not a multiple"),
        (HEADER + ",statistic", GOOD + ",mean", "line 2, column 'statistic' is 'mean'; use one of list"),
        (HEADER + ",discount", GOOD + ",1", "line 1, column 'discount' is not known; use provider, tier"),
        ("provider,usd_per_hour", "mine,1", "line 1, column 'gpu_canonical_id' is missing; add it"),
        ("gpu_canonical_id", "a10g-24gb", "line 1, column 'usd_per_gpu_hour' is missing; add it"),
    ],
)
def test_a_bad_header_or_optional_cell_is_refused(tmp_path: Path, header: str, line: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        read_price_file(written(tmp_path, line, header=header))
    assert message in str(refused.value)


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no rows"):
        read_price_file(written(tmp_path))
    with pytest.raises(InputError, match="cannot be read"):
        read_price_file(tmp_path / "nowhere.csv")


def test_the_first_file_named_counts_before_the_second(tmp_path: Path) -> None:
    files = []
    for name, price in (("one.csv", 1), ("two.csv", 2)):
        (tmp_path / name).write_text(f"gpu_canonical_id,usd_per_gpu_hour\na10g-24gb,{price}\n")
        files.append(tmp_path / name)
    book = price_book(files, cache_dir=tmp_path)
    assert [j.usd_per_hour for j in book.offers_for("a10g-24gb", providers=("user",))] == [1.0]
    assert book.sources == (str(files[0]), str(files[1]), "shipped snapshot")


def test_one_offer_has_one_price_a_day_and_none_from_days_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1795132800")  # 2026-11-20
    header = "provider,gpu_canonical_id,usd_per_gpu_hour,snapshot_date"
    twice = written(tmp_path, "mine,l4-24gb,0.5,2026-11-01", "mine,l4-24gb,0.6,2026-11-01", header=header)
    with pytest.raises(InputError, match="two prices of mine for l4-24gb on 2026-11-01"):
        read_price_file(twice)
    with pytest.raises(InputError, match="line 2, column 'snapshot_date' is 2027-11-01, which is still to come"):
        read_price_file(written(tmp_path, "mine,l4-24gb,0.5,2027-11-01", header=header))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('gpu_canonical_id,usd_per_gpu_hour,note\nl40s-48gb,1.5,"abc\nl40s-48gb,0.1,x\n', "close every quote"),
        ("gpu_canonical_id,usd_per_gpu_hour,usd_per_gpu_hour\nl40s-48gb,1,9\n", "'usd_per_gpu_hour' stands twice"),
        ("gpu_canonical_id;usd_per_gpu_hour\nl40s-48gb;1\n", "names of columns with commas between them"),
        ("\n\ngpu_canonical_id,usd_per_gpu_hour\nl40s-48gb,1\n", "line 1 holds nothing, but must be the header"),
        ("gpu_canonical_id,usd_per_gpu_hour\nl40s-48gb,1e308\n", "is 1e308, which is above"),
        ("gpu_canonical_id,usd_per_gpu_hour\nl40s-48gb,1_5\n", "is '1_5', not a number"),
        (f"gpu_canonical_id,usd_per_gpu_hour,note\nl40s-48gb,1,{'x' * 140_000}\n", "is no whole CSV"),
    ],
)
def test_files_of_which_rows_would_be_lost_or_misread(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=told):
        read_price_file(path)


def test_other_encodings_are_told_how_to_save(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("gpu_canonical_id,usd_per_gpu_hour\nl40s-48gb,1\n", encoding="utf-16")
    with pytest.raises(InputError, match="is not UTF-8 text; save it as CSV UTF-8"):
        read_price_file(path)
