"""The verbs `context` and `completion`: names for daemons in a file of the user, and the completion script of a shell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

from plainsong.cli import output
from plainsong.cli.command import CommandFailed, Exit, Verb, VerbGroup, json_option
from plainsong.cli.connection import Context, Contexts, Where, checked_name, complete_context, load_contexts
from plainsong.cli.output import echo_json
from plainsong.settings import Settings


@click.group(cls=VerbGroup)
def context() -> None:
    """Name daemons, so that you need no --url.

    Contexts are kept in $XDG_CONFIG_HOME/plainsong/contexts.toml. Options and
    the variables PLAINSONG_URL, PLAINSONG_NAMESPACE and PLAINSONG_TOKEN_FILE
    override the current context; --context NAME overrides the variables.
    """


@context.command(
    examples=[
        "plainsong context add local --url http://127.0.0.1:7420",
        "plainsong context add prod --url http://a.example:7420,http://b.example:7420 \\",
        "    --namespace shop --token-file ~/.plainsong-token --use",
    ]
)
@click.argument("name")
@click.option("--url", required=True, metavar="URL", help="Address of the daemon; comma-separated for a cluster.")
@click.option("-n", "--namespace", metavar="NAME", help="Namespace of the topics.")
@click.option("--token-file", metavar="FILE", help="File with a bearer token on its only line.")
@click.option("--ca-file", metavar="FILE", help="CA certificates to trust for https; default: the system's.")
@click.option("--certificate", metavar="FILE", help="Client certificate; needs --key.")
@click.option("--key", metavar="FILE", help="Key of that certificate.")
@click.option("--use", "use_it", is_flag=True, help="Make it the current context; the first one always is.")
@click.option("--force", is_flag=True, help="Replace a context of this name.")
@json_option
def add(
    name: str, url: str, namespace: str | None, use_it: bool, force: bool, as_json: bool, **files: str | None
) -> None:
    """Name a daemon.

    Only the paths of files are kept; a token is read when it is needed, and
    never shown.
    """
    checked_name(name)
    contexts = load_contexts()
    if name in contexts.by_name and not force:
        raise CommandFailed(f"context {name!r} already exists", hint="--force replaces it")
    kept: dict[str, Any] = {key: None if file is None else str(Path(file).absolute()) for key, file in files.items()}
    urls = tuple(each.strip() for each in url.split(","))
    access = Where(urls, **kept, insecure=True).access
    settings = Settings.checked(
        url,
        namespace=namespace or "default",
        **access,
        connect_timeout_s=1,
        request_timeout_s=1,
        deadline_s=1,
        retry=False,
        max_connections=1,
    )
    contexts.by_name[name] = Context(settings.urls, namespace, **kept)
    is_first = contexts.current is None
    if use_it or is_first:
        contexts.current = name
    contexts.save()
    _show(contexts, name, as_json=as_json)
    if is_first and not use_it:
        output.report(f"{name} is the first context, and therefore the current one: commands without --url use it")


@context.command(examples=["plainsong context use prod"])
@click.argument("name", shell_complete=complete_context)
@json_option
def use(name: str, as_json: bool) -> None:
    """Make a context the current one."""
    contexts = load_contexts()
    contexts.named(name)
    contexts.current = name
    contexts.save()
    _show(contexts, name, as_json=as_json)


@context.command(name="ls", examples=["plainsong context ls"])
@json_option
def list_contexts(as_json: bool) -> None:
    """List the contexts; a star marks the current one."""
    contexts = load_contexts()
    if as_json:
        echo_json([_as_json(contexts, name) for name in sorted(contexts.by_name)])
        return
    rows = [
        (("* " if name == contexts.current else "  ") + name, each.namespace or "default", ", ".join(each.urls))
        for name, each in sorted(contexts.by_name.items())
    ]
    if rows:
        output.echo_lines(output.table(("  NAME", "NAMESPACE", "URL"), rows))
    else:
        click.echo("no contexts; plainsong context add NAME --url URL adds one")


@context.command(examples=["plainsong context show", "plainsong context show prod --json"])
@click.argument("name", required=False, shell_complete=complete_context)
@json_option
def show(name: str | None, as_json: bool) -> None:
    """Show a context, the current one by default."""
    contexts = load_contexts()
    name = name or contexts.current
    if name is None:
        hint = "plainsong context add NAME --url URL adds one"
        raise CommandFailed("no current context", hint=hint, code=Exit.NOT_FOUND)
    contexts.named(name)
    _show(contexts, name, as_json=as_json)


@context.command(examples=["plainsong context rm prod"])
@click.argument("name", shell_complete=complete_context)
@json_option
def rm(name: str, as_json: bool) -> None:
    """Remove a context. Nothing changes on the daemon."""
    contexts = load_contexts()
    contexts.named(name)
    removed = _as_json(contexts, name)
    del contexts.by_name[name]
    if contexts.current == name:
        contexts.current = None
    contexts.save()
    if as_json:
        echo_json(removed)
    else:
        click.echo(f"removed context {name}")


def _show(contexts: Contexts, name: str, *, as_json: bool) -> None:
    if as_json:
        echo_json(_as_json(contexts, name))
        return
    each = contexts.by_name[name]
    pairs = [("name", name + (" (current)" if name == contexts.current else "")), ("url", ", ".join(each.urls))]
    pairs += [("namespace", each.namespace or "default"), ("token file", each.token_file or "none")]
    pairs += [(key.replace("_", " "), file) for key, file in each.files().items() if file and key != "token_file"]
    output.echo_lines(output.facts([*pairs, ("file", str(contexts.path))]))


def _as_json(contexts: Contexts, name: str) -> dict[str, Any]:
    each = contexts.by_name[name]
    return {
        "name": name,
        "current": name == contexts.current,
        "url": list(each.urls),
        "namespace": each.namespace,
        "tokenFile": each.token_file,
        "caFile": each.ca_file,
        "certificate": each.certificate,
        "key": each.key,
    }


# --- completion ------------------------------------------------------------------------------------


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

    It completes verbs, options and contexts, and asks the daemon for the names
    of topics.
    """
    found = get_completion_class(shell)
    if found is None:
        raise CommandFailed(f"no completion for {shell}")
    script = found(ctx.find_root().command, {}, "plainsong", "_PLAINSONG_COMPLETE")
    click.echo(script.source_template % script.source_vars())
