"""``plainsong serve``: loads the settings, sets up the logs, runs the daemon, and reports how it ended."""

from __future__ import annotations

import errno
import logging
import resource
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio

from broker.command.failures import leaves
from broker.command.options import load_settings, refuse_strangers, setting_options
from broker.freed_memory import bound_freed_memory
from broker.front import FrontEndFailed
from broker.http.sockets import BindFailed
from broker.logs import Logs, setup_logs
from broker.main import Running, banner
from broker.security.files import FileUnusable
from broker.tracing import TracesUnavailable
from plainsong.cli.command import CommandFailed, Exit
from plainsong.protocol.cluster import NameTaken
from plainsong.protocol.errors import StorageFailed
from storage.base import StoreError, StoreUnusable
from storage.directory import NO_THREADS_HINT
from storage.replication.protocol import Foreign, ReignOver
from storage.threaded import NO_THREAD, NoThread, is_refused

if TYPE_CHECKING:
    from broker.config import Config

_DEPOSED_HINT = (
    "another process owns the copy of this store now; commits that this one acknowledged after its last upload are only "
    "in this directory. To follow the new primary: plainsong replica rejoin"
)
logger = logging.getLogger(__name__)
#: Explanations and hints for errors of ``bind``.
_BIND_ERRORS = {
    errno.EADDRINUSE: ("is in use", "another daemon or program listens there; choose a port with --bind"),
    errno.EADDRNOTAVAIL: ("is not an address of this machine", "choose another with --bind"),
    errno.EACCES: ("permission denied", "ports below 1024 need privileges; choose another with --bind"),
}


@click.command()
@setting_options
@click.option("--standby", "is_standby", is_flag=True, help="The same as --set replication.role=standby.")
@click.option("--testing", type=click.Path(path_type=Path), metavar="SOCKET", help="For plainsong.testing only.")
def serve(
    file: Path | None,
    data_dir: str | None,
    bind: str | None,
    sets: tuple[str, ...],
    is_standby: bool,
    testing: Path | None,
) -> None:
    """Run the daemon until SIGTERM or Ctrl-C.

    Without options it listens on 127.0.0.1:7420 and keeps its messages in
    ./data. The settings are those of `plainsong config show`.
    """
    if is_standby:
        sets = (*sets, "replication.role=standby")
    config = load_settings(file, data_dir, bind, sets).config
    refuse_strangers(config)
    if testing is not None:
        check_testing(config)
    bound_freed_memory()
    try:
        logs = setup_logs(config.log, sys.stdout)
    except RuntimeError as error:
        raise failure_of(error, config) or error from error
    try:
        _run(config, logs, testing)
    finally:
        logs.close()


def check_testing(config: Config) -> None:
    """Raise CommandFailed if there is data that a test could harm."""
    kind, directory = config.storage.kind, config.storage.data_dir
    # Outside the directory, which accepts no foreign files. The mark lets a daemon under test be restarted there.
    mark = directory.with_name(directory.name + ".under-test")
    is_new = not directory.exists() or not any(directory.iterdir())
    if kind == "leveldb" and is_new:
        directory.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    if kind == "hbase" or (kind == "leveldb" and not mark.exists()):
        raise CommandFailed(
            "--testing is for a store in memory or a new directory",
            hint="--set storage.kind=memory, or another --data-dir",
            code=Exit.USAGE,
        )
    if config.http.processes > 1 or config.cluster.zookeeper:
        raise CommandFailed("--testing is for one daemon of one process", code=Exit.USAGE)


def _run(config: Config, logs: Logs, testing: Path | None) -> None:
    from broker.main import run_daemon  # here, so that a test can replace it

    # Each connection needs a descriptor, and so does each open table of the store, which keeps up to 500 open.
    wanted = config.http.max_connections + 600
    if (allowed := allow_open_files(wanted)) < wanted:
        logger.warning("few open files are allowed", extra={"allowed": allowed, "wanted": wanted})

    def announce(running: Running) -> None:
        facts: dict[str, object] = {
            "addresses": running.addresses,
            "data_dir": running.data_dir,
            "store": running.store_kind,
            "durability": running.durability,
            "daemon_version": running.version,
            "decides": running.decides,
            "thrift": running.thrift,
            "cluster": running.cluster,
        }
        logs.announce(banner(running), "serving", **facts)
        for waived in running.insecure:
            logger.warning(waived, extra={"why": "security.allow_insecure"})

    async def daemon() -> None:
        if testing is None:
            await run_daemon(config, announce=announce)
            return
        from broker.testing import Testing

        await run_daemon(config, announce=announce, testing=Testing(testing))

    try:
        trio.run(daemon)
    except BaseException as error:
        for leaf in leaves(error):
            if isinstance(leaf, KeyboardInterrupt | SystemExit):
                raise leaf from None
        failed = failure_of(error, config)
        if failed is None:
            logger.critical("the daemon failed", exc_info=True)
            failed = CommandFailed(
                f"the daemon failed: {_last_line(error)}", hint="this is a bug; the log has the traceback"
            )
        raise failed from error


def failure_of(error: BaseException, config: Config) -> CommandFailed | None:
    """Return the command's failure for a daemon that ended with ``error``; None if that is a bug."""
    for leaf in leaves(error):
        if isinstance(leaf, StoreUnusable | StoreError):
            return CommandFailed(leaf.detail, hint=leaf.hint, code=Exit.STORE)
        if isinstance(leaf, ReignOver | Foreign):
            return CommandFailed(leaf.detail, hint=leaf.hint or _DEPOSED_HINT, code=Exit.DEPOSED)
        if isinstance(leaf, StorageFailed):
            return CommandFailed(leaf.detail, hint=leaf.hint, code=Exit.STORE)
        if isinstance(leaf, FileUnusable | TracesUnavailable):
            return CommandFailed(str(leaf), hint=leaf.hint, code=Exit.USAGE)
        if isinstance(leaf, NoThread) or is_refused(leaf):
            return CommandFailed(NO_THREAD, hint=NO_THREADS_HINT)
        if isinstance(leaf, NameTaken):
            return CommandFailed(leaf.detail, hint=leaf.hint)
        if isinstance(leaf, FrontEndFailed):
            return CommandFailed(str(leaf), hint="its messages are above; http.processes = 1 runs without front ends")
        if isinstance(leaf, socket.gaierror):
            return CommandFailed(f"http.bind {config.http.bind}: {leaf.strerror}", hint="choose another with --bind")
        if isinstance(leaf, BindFailed):
            what, hint = _BIND_ERRORS.get(leaf.errno or 0, (f"cannot be used: {leaf.strerror}", "choose another"))
            if leaf.bind == config.transactions.thrift:
                hint = hint.replace("with --bind", "for it")
                return CommandFailed(f"transactions.thrift {leaf.bind} {what}", hint=hint)
            return CommandFailed(f"http.bind {leaf.bind} {what}", hint=hint)
    return None


def _last_line(error: BaseException) -> str:
    leaf = next(leaves(error))
    return f"{type(leaf).__name__}: {leaf}".splitlines()[0]


# --- open files ------------------------------------------------------------------------------------


def allow_open_files(wanted: int) -> int:
    """Raise this process's limit on open files to ``wanted``, as far as allowed, and return the limit.

    A shell's limit is often 1024, for programs that ``select``; a process may usually raise it much further.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):
        return soft
    return target
