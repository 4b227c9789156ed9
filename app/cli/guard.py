"""What a command may end with: an exit code, and on failure one sentence on stderr.

0 fine; 1 run-time failure; 2 bad input or usage; 3 the answer is no; 130 interrupted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from tunecast.calibrate.environment import MEASURING_PACKAGES
from tunecast.catalogs.errors import TunecastError

RUNTIME_FAILURE = 1
THE_ANSWER_IS_NO = 3
INTERRUPTED = 130
INSTALL_COMMAND = "pip install 'tunecast[calibrate]'"


def fail(message: str, code: int) -> NoReturn:
    """Print one sentence on stderr and end."""
    print(f"tunecast: {message}", file=sys.stderr)
    raise typer.Exit(code)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what a command raises on purpose into a sentence and an exit code; let bugs show themselves.

    A `BrokenPipeError` is left to typer, which ends quietly when the reader of a pipe has gone.
    """

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except TunecastError as error:
            fail(str(error), error.exit_code)
        except KeyboardInterrupt as stop:
            fail(f"interrupted; {stop}" if stop.args else "interrupted", INTERRUPTED)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in MEASURING_PACKAGES:
                raise
            fail(f"This needs {error.name}, which is not installed; type: {INSTALL_COMMAND}", RUNTIME_FAILURE)
        except BrokenPipeError:
            raise
        except OSError as error:
            where = f" {error.filename}" if error.filename else ""
            fail(f"Cannot use{where}: {error.strerror or error}; check the path and its permissions.", RUNTIME_FAILURE)

    return wrapper
