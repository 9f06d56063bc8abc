"""Generates the manual pages and the shells' completion scripts from the verbs, into ``etc/dist/*/share``.

    python scripts/manpages.py            writes them
    python scripts/manpages.py --check    lists outdated files, and writes nothing

Each distribution installs the pages of its own verbs. The texts are those of ``--help``, taken from click; this script
only formats them as roff. (The library click-man escapes nothing, and does not see lazily loaded verbs.)
"""

from __future__ import annotations

import re
import sys
from inspect import cleandoc
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class

from plainsong import __version__
from plainsong.cli.command import WHERE_OPTIONS, Exit, SharedOption, Verb, WhereOption
from plainsong.cli.context import SHELLS
from plainsong.cli.main import ELSEWHERE, SECTIONS, VERBS, program

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
SHARE = "etc/dist/{}/share"
#: The path below share/ at which each shell looks for a program's script.
COMPLETIONS = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/site-functions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}
#: Environment variables of the options that choose a daemon.
VARIABLES = {
    "url": "PLAINSONG_URL",
    "namespace": "PLAINSONG_NAMESPACE",
    "token_file": "PLAINSONG_TOKEN_FILE",
    "ca_file": "PLAINSONG_CA_FILE",
    "certificate": "PLAINSONG_CERTIFICATE",
    "key": "PLAINSONG_KEY",
    "context": "PLAINSONG_CONTEXT",
}


def files() -> dict[str, str]:
    """Every generated file, by its path in the tree."""
    found = {f"{SHARE.format('client')}/man/man1/plainsong.1": program_page()}
    for name in VERBS:
        found[f"{SHARE.format(brought_by(name))}/man/man1/plainsong-{name}.1"] = verb_page(name)
    found[f"{SHARE.format('server')}/man/man1/plainsong-server.1"] = ".so man1/plainsong.1\n"
    for kind, prog in (("client", "plainsong"), ("server", "plainsong-server")):
        for shell in SHELLS:
            found[f"{SHARE.format(kind)}/{COMPLETIONS[shell].format(prog)}"] = completion_script(shell, prog)
    return found


def brought_by(verb: str) -> str:
    """The distribution that provides the verb."""
    _, distribution = ELSEWHERE.get(VERBS[verb].where.partition(".")[0], ("", "plainsong-client"))
    return distribution.removeprefix("plainsong-")


def completion_script(shell: str, prog: str) -> str:
    """The script that ``plainsong completion`` prints; it asks the program, so it never goes stale."""
    found = get_completion_class(shell)
    assert found is not None
    # Not source(): bash's looks for a bash on this machine, and warns on standard error.
    script = found(program, {}, prog, "_PLAINSONG_COMPLETE")
    return (script.source_template % script.source_vars()).strip() + "\n"


# --- pages -----------------------------------------------------------------------------------------


def program_page() -> str:
    """plainsong(1): what all verbs share, and the list of them."""
    ctx = click.Context(program, info_name="plainsong")
    lines = [*_head("plainsong", "topics of messages in one durable order"), ".SH SYNOPSIS"]
    lines += [".B plainsong", "[\\fIOPTIONS\\fR] \\fIVERB\\fR [\\fIARGUMENTS\\fR]", ".SH DESCRIPTION"]
    # The codes have a section of their own, from the declaration.
    lines += _text(cleandoc(program.help or "").partition("\b\nExit codes")[0])
    lines.append(".SH VERBS")
    for title, verbs in SECTIONS.items():
        lines.append(f".SS {_roff(title)}")
        for name, listed in verbs.items():
            lines += [".TP", f".BR plainsong\\-{_roff(name)} (1)", _roff(listed.says)]
    own = [each for each in program.get_params(ctx) if not isinstance(each, WhereOption)]
    lines += [".SH OPTIONS", *_options(ctx, own)]
    lines += [
        ".SS Which daemon",
        *_options(ctx, [each for each in program.get_params(ctx) if isinstance(each, WhereOption)]),
    ]
    lines.append(".SH ENVIRONMENT")
    for option, variable in VARIABLES.items():
        lines += [".TP", f".B {variable}", f"as \\fB{_roff(WHERE_OPTIONS[option][0][-1])}\\fR"]
    lines.append(".SH EXIT STATUS")
    for code, says in _exit_codes():
        lines += [".TP", f".B {code}", _roff(says)]
    others = [f".BR plainsong\\-{_roff(name)} (1)" for name in sorted(VERBS)]
    lines += [".SH SEE ALSO", *(f"{each}," for each in others[:-1]), others[-1]]
    return "\n".join(lines) + "\n"


def verb_page(name: str) -> str:
    """plainsong-VERB(1), with the verbs of a group as sections."""
    root = click.Context(program, info_name="plainsong")
    command = program.get_command(root, name)
    assert command is not None
    lines = _head(f"plainsong-{name}", VERBS[name].says.rstrip("."))
    lines.append(".SH SYNOPSIS")
    found = list(_walk(command, click.Context(command, info_name=name, parent=root)))
    runnable = [ctx for ctx in found if not isinstance(ctx.command, click.Group) or ctx.command.invoke_without_command]
    for place, ctx in enumerate(runnable):
        lines += ([".br"] if place else []) + _synopsis(ctx)
    lines += [".SH DESCRIPTION", *_text(command.help or "")]
    first, *below = found
    lines += _details(first, ".SH")
    if below:
        lines.append(".SH VERBS")
    for ctx in below:
        if isinstance(ctx.command, click.Group) and not ctx.command.invoke_without_command:
            continue
        lines += [f".SS {_roff(ctx.command_path)}", *_text(ctx.command.help or ""), *_details(ctx, ".PP")]
    if any(isinstance(option, WhereOption) for ctx in found for option in ctx.command.get_params(ctx)):
        lines += [".SH WHICH DAEMON", "The options that choose a daemon, and", ".BR \\-\\-json ,"]
        lines += ["work before or after the verb; they are in", ".BR plainsong (1)."]
    lines += [".SH EXIT STATUS", "As in", ".BR plainsong (1).", ".SH SEE ALSO", ".BR plainsong (1)"]
    return "\n".join(lines) + "\n"


def _head(page: str, says: str) -> list[str]:
    # No date: it would change the page every day.
    says = says[:1].lower() + says[1:]
    return [f'.TH {_roff(page.upper())} 1 "" "Plainsong {__version__}"', ".SH NAME", f"{_roff(page)} \\- {_roff(says)}"]


def _walk(command: click.Command, ctx: click.Context) -> Iterator[click.Context]:
    """The command and all below it, in the order of its help."""
    yield ctx
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            sub = command.get_command(ctx, name)
            if sub is not None and not sub.hidden:
                yield from _walk(sub, click.Context(sub, info_name=name, parent=ctx))


def _synopsis(ctx: click.Context) -> list[str]:
    pieces = " ".join(ctx.command.collect_usage_pieces(ctx))
    return [f".B {_roff(ctx.command_path)}", _roff(pieces)]


def _details(ctx: click.Context, heading: str) -> list[str]:
    """The command's own options, and its examples."""
    shared = (WhereOption, SharedOption) if isinstance(ctx.command, click.Group) else (WhereOption,)
    own = [each for each in ctx.command.get_params(ctx) if not isinstance(each, shared)]
    options, lines = _options(ctx, own), []
    if options:
        lines += [".SH OPTIONS", *options] if heading == ".SH" else options
    if isinstance(ctx.command, Verb) and ctx.command.examples:
        lines += [".SH EXAMPLES"] if heading == ".SH" else [".PP", "Examples:", ".PP"]
        lines += _literal(ctx.command.examples)
    return lines


def _options(ctx: click.Context, params: Iterable[click.Parameter]) -> list[str]:
    lines: list[str] = []
    for param in params:
        record = param.get_help_record(ctx)
        if record is not None and isinstance(param, click.Option) and "--help" not in param.opts:
            switches, says = record
            lines += [".TP", f".B {_roff(switches)}", *_lines(says or "\\&")]
    return lines


def _exit_codes() -> Iterator[tuple[int, str]]:
    for line in cleandoc(Exit.__doc__ or "").splitlines():
        if match := re.fullmatch(r"(\d+) +(.+)", line):
            yield int(match[1]), match[2]


# --- roff ------------------------------------------------------------------------------------------


def _text(written: str) -> list[str]:
    """Format a click docstring; paragraphs after a \\b keep their line breaks."""
    lines: list[str] = []
    for paragraph in re.split(r"\n[ ]*\n", cleandoc(written)):
        if paragraph.startswith("\b"):
            lines += [".PP", *_literal(paragraph.removeprefix("\b").strip("\n").split("\n"))]
        elif paragraph.strip():
            lines += [".PP", *_lines(paragraph)]
    return lines[1:] if lines[:1] == [".PP"] else lines


def _literal(written: Sequence[str]) -> list[str]:
    return [".RS 2", ".nf", *(_roff(line) for line in written), ".fi", ".RE"]


def _lines(written: str) -> list[str]:
    # Keep bold text on one line, since the markup ends with the line.
    joined = re.sub(r"`[^`]+`", lambda bold: bold[0].replace(" ", "\xa0"), " ".join(written.split()))
    return [
        _roff(line).replace("\xa0", " ") for line in wrap(joined, 72, break_long_words=False, break_on_hyphens=False)
    ]


def _roff(written: str) -> str:
    """One line of text, with text between backticks in bold."""
    line = written.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    line = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", line)
    return f"\\&{line}" if line[:1] in (".", "\\") and line[:2] not in ("\\-", "\\f", "\\(", "\\e") else line


def main() -> None:
    """The command line."""
    made = files()
    there = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"{SHARE.format('*')}/**/*") if path.is_file()}
    stale = [
        name for name, text in made.items() if name not in there or (ROOT / name).read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        wrong = sorted({*stale, *(there - set(made))})
        sys.exit("".join(f"{name} is not what the verbs say; run: make man\n" for name in wrong) or 0)
    for name in there - set(made):
        (ROOT / name).unlink()
    for name in stale:
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(made[name], encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()
