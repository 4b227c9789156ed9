"""``tunecast web``: the calculator as a page."""

from __future__ import annotations

from typing import Annotated

import typer


def web(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 7860,
) -> None:
    """Open the calculator page on this machine."""
    from tunecast.catalogs.errors import InputError
    from tunecast.cli.progress import spinner
    from tunecast.web.page import build

    with spinner("opening the page"):
        page = build()
    try:
        page.launch(server_name=host, server_port=port, share=False)
    except OSError as error:
        raise InputError(
            f"The page cannot be opened on --host {host} --port {port}: the port is taken, or the address is none of "
            "this machine's; type for example --host 127.0.0.1 --port 7861."
        ) from error
