"""Every error of use is one line on stderr and exit code 2; no traceback."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from rag_windows.errors import RagWindowsError
from rag_windows.prompt.visible_text import one_line

EXIT_ERROR, EXIT_INTERRUPTED = 2, 130


def tell(message: str) -> None:
    """Print one line to stderr, whatever the message holds."""
    print(one_line(message), file=sys.stderr, flush=True)


class Group(TyperGroup):
    """A group of commands: it shows its help where no command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Show the help instead of an error about a missing command."""
        _without_type(self, ctx)
        if not args:
            typer.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)


def _without_type(command: Any, ctx: Any) -> None:
    """Keep the help from showing `<bool>` behind flags, as if they took a value."""
    for option in command.get_params(ctx):
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    for below in getattr(command, "commands", {}).values():
        _without_type(below, ctx)


class OneLineErrors(Group):
    """Turns our errors and those of the option parser into one line and an exit code."""

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run a command; see `typer.core.TyperGroup.main` for the arguments."""
        # A character that the terminal's encoding lacks must not end the command.
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
        try:
            code = super().main(*args, **{**options, "standalone_mode": False}) or 0
        except typer.Abort:
            code = EXIT_INTERRUPTED
        except (typer.TyperException, RagWindowsError) as error:
            tell(f"Error: {_message(error)}")
            for note in getattr(error, "__notes__", ()):
                tell(note)
            code = EXIT_ERROR
        except RuntimeError as error:
            # torch need not be imported to name its class.
            if type(error).__name__ != "OutOfMemoryError":
                raise
            tell(
                "Error: the accelerator's memory is full; take fewer passages (--top-k), a "
                "smaller model, --dtype bfloat16, or --device cpu."
            )
            code = EXIT_ERROR
        if not standalone_mode:
            return code
        sys.exit(code)


def _message(error: typer.TyperException | RagWindowsError) -> str:
    if isinstance(error, RagWindowsError):
        return str(error)
    message = error.format_message().rstrip(".")
    command = getattr(getattr(error, "ctx", None), "command", None)
    takes_docs = any(one.name == "docs" for one in getattr(command, "params", ()))
    if takes_docs and "extra argument" in message:
        return f"{message}; each file of --docs needs a --docs of its own, patterns need quotes."
    return f"{message}; see rag-windows --help."
