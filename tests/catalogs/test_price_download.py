"""gpuhunt's own download path, against a server on this machine that publishes lists as its bucket does."""

from __future__ import annotations

import gc
import io
import socket
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tunecast.catalogs.errors import TunecastError
from tunecast.catalogs.price_cache import cached_offers
from tunecast.catalogs.price_refresh import LISTED_PROVIDERS, refresh_prices

pytest.importorskip("gpuhunt")
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
"""urllib leaves the socket of a download that timed out to the garbage collector."""


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What is left to the garbage collector is collected before another test could be blamed for it."""
    yield
    gc.collect()


HEADER = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags"
LIST = f"{HEADER}\ng5.xlarge,us-east-1,1.01,4,16.0,1,A10G,24.0,False,,nvidia,\nbroken,row\n"
VERSION = "20261118-42"


class Bucket(BaseHTTPRequestHandler):
    """`/aws/version` and `/aws/<version>/catalog.zip`; every other provider is missing."""

    def do_GET(self) -> None:
        if self.path == "/aws/version":
            self.answer(VERSION.encode())
        elif self.path == f"/aws/{VERSION}/catalog.zip":
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w") as archive:
                archive.writestr("aws.csv", LIST)
            self.answer(packed.getvalue())
        else:
            self.send_error(404)

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.delenv("GPUHUNT_CATALOG_DIR", raising=False)
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.usefixtures("bucket")
def test_a_downloaded_list_carries_the_day_of_its_version(tmp_path: Path) -> None:
    done = refresh_prices(["aws", "gcp", "runpod"], cache_dir=tmp_path, timeout_s=20.0)
    assert done.counts == {"aws": 1}
    held = cached_offers(tmp_path)
    assert held is not None
    (offer,) = held.offers
    assert (offer.gpu_id, offer.usd_per_hour, offer.snapshot_date) == ("a10g-24gb", 1.01, "2026-11-18")
    assert "gpuhunt" in offer.source


@pytest.mark.usefixtures("bucket")
def test_providers_whose_list_is_missing_are_told(tmp_path: Path) -> None:
    done = refresh_prices(["aws", "gcp", "runpod"], cache_dir=tmp_path, timeout_s=20.0)
    assert done.failed == dict.fromkeys(("gcp", "runpod"), "its list could not be downloaded")


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and stays silent: gpuhunt alone would wait for ever."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        monkeypatch.delenv("GPUHUNT_CATALOG_DIR", raising=False)
        monkeypatch.setenv("GPUHUNT_CATALOG_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(TunecastError, match=r"No price was refreshed: .*time"):
            refresh_prices(["aws"], cache_dir=tmp_path, timeout_s=0.5)
    assert list(tmp_path.iterdir()) == []


def test_the_published_lists_are_those_of_the_installed_gpuhunt() -> None:
    from gpuhunt._internal.catalog import OFFLINE_PROVIDERS

    assert set(OFFLINE_PROVIDERS) == set(LISTED_PROVIDERS)
