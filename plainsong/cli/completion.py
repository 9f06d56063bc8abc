"""``plainsong completion``: the script that teaches a shell our verbs, options and topics."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from plainsong.cli.exits import CommandFailed
from plainsong.cli.verb import Verb

SHELLS = ("bash", "zsh", "fish")


@click.command(
    cls=Verb,
    examples=[
        'eval "$(plainsong completion bash)"      # in ~/.bashrc',
        'eval "$(plainsong completion zsh)"       # in ~/.zshrc, after compinit',
        "plainsong completion fish > ~/.config/fish/completions/plainsong.fish",
    ],
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    Verbs, options and contexts are completed, and names of topics, for which
    the daemon is asked.
    """
    found = get_completion_class(shell)
    if found is None:
        raise CommandFailed(f"no completion for {shell}")
    script = found(ctx.find_root().command, {}, "plainsong", "_PLAINSONG_COMPLETE")
    click.echo(script.source_template % script.source_vars())
