"""``vescale-fsdp doctor``: what this machine has, whether it works, and what to change."""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from vescale_fsdp.cli.checkup.findings import Section

_Json = Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")]
_NoSelfTest = Annotated[bool, typer.Option("--no-self-test", help="Only look.")]


def doctor(as_json: _Json = False, no_self_test: _NoSelfTest = False) -> int:
    """Show what this machine has, test it, and say what to change.

    The test starts two processes that talk to each other, train and save for some seconds. The
    exit code is 0 if all of it works, and 1 if something does not.
    """
    # Imported here: --help need not wait for it.
    from rich.console import Console

    from vescale_fsdp.cli.checkup import show

    with _watching("testing with two processes" if not no_self_test else "looking"):
        sections = _examine(with_test=not no_self_test)
    if as_json:
        sys.stdout.write(json.dumps(show.as_json(sections), indent=1) + "\n")
    else:
        show.show(sections, Console())
    return 0 if show.works(sections) else 1


def _examine(with_test: bool) -> list[Section]:
    from vescale_fsdp.cli.checkup.devices import look_at_devices
    from vescale_fsdp.cli.checkup.environment import look_at_environment
    from vescale_fsdp.cli.checkup.findings import look
    from vescale_fsdp.cli.checkup.host import look_at_host, usable_cpus
    from vescale_fsdp.cli.checkup.selftest import look_at_self_test, look_at_torch, self_test
    from vescale_fsdp.cli.checkup.software import look_at_software

    environ = dict(os.environ)
    # The machine first: the test itself keeps it busy.
    machine = look("machine", look_at_host)
    outcome, loopback = self_test(environ) if with_test else (look_at_torch(environ), "")
    sections = [
        look("software", look_at_software),
        look("devices", lambda section: look_at_devices(section, outcome)),
        machine,
        look("environment", lambda section: look_at_environment(section, environ, usable_cpus())),
    ]
    if with_test:
        test = look("self-test", lambda section: look_at_self_test(section, outcome, loopback))
        sections.append(test)
    return sections


def _watching(what: str) -> AbstractContextManager[Any]:
    """Says on stderr what takes so long, where somebody watches."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)
