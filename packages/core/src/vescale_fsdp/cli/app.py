"""The commands of ``vescale-fsdp``, ours and those of plug-ins.

A plug-in is an entry point in the group ``vescale_fsdp.cli``: a function that gets the typer app
and adds its commands to it::

    [project.entry-points."vescale_fsdp.cli"]
    weigh = "my_package.weigh:add_to"           # def add_to(app): app.command("weigh")(weigh)

If a plug-in fails, a warning names it, and its commands are missing.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

from vescale_fsdp.cli import checkpoint
from vescale_fsdp.cli.doctor import doctor
from vescale_fsdp.cli.text import InputError, plain
from vescale_fsdp.errors import VeScaleError

PLUGINS = "vescale_fsdp.cli"
_OF_TUNE = ("plan", "tune")  # commands of the companion ``vescale-fsdp-tune``
_INSTALL = 'pip install "vescale-fsdp[tune]"'
_ANY = {"allow_extra_args": True, "ignore_unknown_options": True}

_SIGPIPE = 141  # the usual exit code after a broken pipe, for example with `| head`

# The base class of typer's errors for bad arguments. It is click's or typer's own, by version.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit code."""
    if sys.stdout is None:
        return _refuse("cannot write the output: stdout is closed")
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for names that it cannot encode
        code = _run(arguments)
        sys.stdout.flush()  # here, because errors at exit cannot be caught
    except BrokenPipeError:
        return _leave_stdout(_SIGPIPE)
    except SystemExit as leave:  # typer's answer to a broken pipe
        if not isinstance(leave.__context__, BrokenPipeError):
            raise
        return _leave_stdout(_SIGPIPE)
    except OSError as error:
        _refuse(f"cannot write the output: {error.strerror or error}")
        return _leave_stdout(2)
    return code


def _leave_stdout(code: int) -> int:
    """Discard buffered output. Else Python would try to write it at exit and print an error."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = sys.stdout.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return code


def _run(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        result = make_app()(given, prog_name="vescale-fsdp", standalone_mode=False)
    except _UsageError as error:
        message: str = error.format_message()  # type: ignore[attr-defined]
        return _refuse(f"{message.rstrip('.')}. Try --help.")
    except (InputError, VeScaleError) as error:
        return _refuse(str(error))
    except typer.Abort:
        return _refuse("aborted")
    return result if isinstance(result, int) else 0


def make_app() -> typer.Typer:
    """The app with all commands."""
    app = typer.Typer(
        name="vescale-fsdp",
        help="Tools of veScale-FSDP: sharded training that respects the structure of the model.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its boxes leave too little width for the text
    )
    app.callback()(_options)
    app.command("doctor")(doctor)
    app.add_typer(checkpoint.app, name="checkpoint")
    for plugin in entry_points(group=PLUGINS):
        _add(app, plugin)
    known = {each.name for each in app.registered_commands}
    for name in _OF_TUNE:
        if name not in known:
            app.command(name, context_settings=_ANY, add_help_option=False)(_not_installed(name))
    return app


def _not_installed(name: str) -> Callable[[], None]:
    def command() -> None:
        raise InputError(
            f"{name} is a command of vescale-fsdp-tune, which is not loaded: {_INSTALL}"
        )

    command.__doc__ = f"Not installed: {_INSTALL}"
    return command


def _add(app: typer.Typer, plugin: EntryPoint) -> None:
    commands, groups = list(app.registered_commands), list(app.registered_groups)
    try:
        plugin.load()(app)
        typer.main.get_command(app)  # typer checks the new commands' parameters here
    except Exception as error:  # noqa: BLE001  # the code of a plug-in may raise anything
        app.registered_commands, app.registered_groups = commands, groups
        _say(
            f"warning: the plug-in {plugin.name!r} ({plugin.value}) is ignored, "
            f"{type(error).__name__}: {error}"
        )


def _show_version(wanted: bool) -> None:
    if wanted:
        from vescale_fsdp import __version__

        print(f"vescale-fsdp {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """The options before the name of a command."""


def _refuse(message: str) -> int:
    _say(message)
    return 2


def _say(message: str) -> None:
    print(f"vescale-fsdp: {plain(' '.join(message.split()))}", file=sys.stderr)
