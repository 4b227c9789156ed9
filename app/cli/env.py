"""``tunecast env``: what a bug report needs."""

from __future__ import annotations

from tunecast.cli.options import Json


def env(as_json: Json = False) -> None:
    """Show versions, GPUs and CPU for a bug report."""
    from tunecast.cli.console import print_json, show
    from tunecast.cli.progress import spinner
    from tunecast.environment import environment, environment_table

    with spinner("looking at this machine"):
        facts = environment()
    if as_json:
        print_json(facts)
    else:
        show(*environment_table(facts))
