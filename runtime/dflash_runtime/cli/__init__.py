"""The command line `dflash`: finds the command, and turns errors into one line and an exit code.

Knows the names of the commands and what each is for. A command is a module of its own, imported only when it runs, so
that help is quick and nothing is loaded that a command does not need.
"""

import importlib
import traceback
from typing import Any

import click
from dflash_graphs.errors import DFlashError

COMMANDS = {
    "export": "Turn a target and its drafter into a bundle.",
    "generate": "Continue a prompt with a bundle.",
    "chat": "Hold a conversation with a bundle.",
    "show": "List what is inside a bundle.",
    "bench": "Measure what drafting gains on sets of prompts.",
    "tune": "Measure what widths cost on this machine, and find the best settings.",
    "verify": "Prove that drafting changes nothing on this machine.",
    "models": "List published drafters and whether they are supported.",
    "doctor": "Examine this machine: CPU, kernels, precision, memory.",
    "cache": "List or shrink what is kept in the cache folder.",
    "demo": "Compare plain and DFlash decoding of a small built-in pair.",
}
_INTERRUPTED = 130  # what shells report for a program ended by SIGINT


class LazyGroup(click.Group):
    """A group whose commands are modules of this package, each with a click command named `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):  # click would import every command for its help
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader left; click ends quietly
        except (DFlashError, OSError) as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            click.echo(f"Error: {error}", err=True)
            ctx.exit(getattr(error, "exit_code", 1))
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(_INTERRUPTED)


@click.group(cls=LazyGroup)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="dflash-openvino")
def main(debug: bool) -> None:
    """Exact speculative decoding with DFlash drafters on CPUs."""
