"""`noria`: dispatches to one file per command, importing only the one that runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from noria.types import NoriaError

# Commands with a file of their own: its help line, and the module with `add_arguments(parser)` and `run(arguments) -> int`.
COMMANDS = {
    "serve": "serve a model over HTTP (OpenAI's API)",
    "chat": "talk to a model in the terminal",
    "run": "answer a file of requests (OpenAI's batch lines)",
    "bench": "measure latency, throughput, a server, quality, kernels",
    "doctor": "what was found on this machine, and how a model would fit",
}
FAMILIES = ("pull",)  # modules that add several parsers themselves: `add_parsers(subparsers)`


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point. Returns the exit status: 0, 1 for a failure told in one line, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(arguments)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except NoriaError as error:
        print(f"noria: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # `noria list | head`: nobody reads on
        return 141


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the command that was named brings its flags (all are listed by `noria --help`)."""
    parser = argparse.ArgumentParser(prog="noria", description="An engine that serves large language models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and leave")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = next((a for a in arguments if not a.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == named:
            module = importlib.import_module(f"noria.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    if named not in COMMANDS:
        for family in FAMILIES:
            importlib.import_module(f"noria.cli.{family}").add_parsers(subparsers)
    return parser


class _Version(argparse.Action):
    """`--version`, without importing package metadata unless asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from noria.observe.version import version

        print(f"noria {version()}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
