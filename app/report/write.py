"""Reports as files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from tunecast.catalogs.errors import InputError, TunecastError
from tunecast.catalogs.files import refuse_one_file_twice, write_all

if TYPE_CHECKING:
    from tunecast.report.gather import Report

MISSING = "A report needs jinja2, which is not installed; run `pip install 'tunecast[report]'`."
PAGE_SUFFIXES = (".html", ".htm")


def check_paths(out: Path, markdown: Path | None) -> None:
    """Raises, before any work is done: InputError for a file that cannot be meant, TunecastError without jinja2."""
    if out.suffix.lower() not in PAGE_SUFFIXES:
        raise InputError(f"--out {out} is no page; type for example --out {out.stem or 'report'}.html.")
    for path in (out, markdown):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path} cannot be written: there is no folder {path.absolute().parent}; name another.")
    refuse_one_file_twice([("--out", out), ("--markdown", markdown)])
    if importlib.util.find_spec("jinja2") is None:
        raise TunecastError(MISSING)


def write_report(report: Report, out: Path, markdown: Path | None) -> list[Path]:
    """Write the page and, if asked, the Markdown: both whole, or neither."""
    from tunecast.report.markdown import markdown_page
    from tunecast.report.page import html_page

    texts = [(out, html_page(report))] + ([(markdown, markdown_page(report))] if markdown is not None else [])
    try:
        write_all(dict(texts))
    except OSError as error:
        raise InputError(
            f"The report {error.filename} cannot be written ({error.strerror}); name another file."
        ) from error
    return [path for path, _ in texts]
