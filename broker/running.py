"""What the daemon says of itself once it accepts connections: the facts of the banner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Running:
    """A daemon that is up."""

    version: str
    addresses: list[str]
    """URLs without a path, as ``http://127.0.0.1:7420``, with the port really bound; at least one."""
    data_dir: Path | None
    """Where the messages are; None where the store keeps no files of its own."""
    store_kind: str
    """``StoreTraits.kind``."""
    durability: str
    """``StoreTraits.durability``: what an acknowledged message survives, in one sentence."""
    decides: str
    """Which transactions it decides, in a few words."""
    thrift: Sequence[str] = ()
    """Where Tephra's clients are served, as ``host:port``; most often nowhere."""
    cluster: str = ""
    """What it is called among others, and how many they are; empty: it is alone."""
    place: str = "in memory"
    """Where the messages are, for a person, when there is no ``data_dir``."""


def banner(running: Running) -> str:
    """What a person sees at the start: a few lines, the last of which can be pasted into a shell."""
    first, *others = running.addresses
    where = running.place if running.data_dir is None else str(running.data_dir.absolute())
    thrift = "".join(f", also for Tephra's clients at {address}" for address in running.thrift)
    cluster = [f"  cluster     {running.cluster}"] if running.cluster else []
    return "\n".join(
        [
            f"plainsong {running.version} listens on {first}" + "".join(f", {other}" for other in others),
            *cluster,
            f"  data        {where} ({running.store_kind})",
            f"  durability  {running.durability}",
            f"  decides     {running.decides}{thrift}",
            "  try         curl -X PUT " + first + "/v1/namespaces/demo/topics/greetings",
        ]
    )
