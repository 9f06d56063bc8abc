"""What names cost: single publishes at 16 connections with authentication and a thousand grants ÷ without.

    python -m bench.named [ROUNDS]

Two daemons stand side by side and are asked in turn, so that what the machine does meanwhile falls on both. The budget is
0.97; processor time says more than the rate where others use the machine.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

from bench.bodies import AVRO_TYPE, path, payloads
from bench.daemon import Daemon, daemon
from bench.generator import load
from bench.load import post
from broker.security.files import write_whole
from broker.security.tokens import TokenEntry, format_tokens, hash_of, id_of, new_token
from plainsong.protocol.codec import AVRO
from plainsong.protocol.requests import PublishRequest

CONNECTIONS = 16
GRANTS = 1_000
SECONDS = 3.0


def files(folder: Path) -> tuple[Path, Path, str]:
    """A tokens file, a grants file of a thousand grants, and the token of a name that the last one lets publish."""
    token = new_token(random.SystemRandom().choice)
    hashed = hash_of(token)
    tokens, grants = folder / "tokens.json", folder / "grants.toml"
    write_whole(tokens, format_tokens([TokenEntry(id_of(hashed), "bench", hashed, 0, None)]))
    each = [
        f'[[grant]]\nto = ["bench", "other-{number}"]\nverbs = ["publish"]\non = ["space{number}:*"]\n'
        for number in range(GRANTS - 1)
    ]
    last = '[[grant]]\nto = ["bench"]\nverbs = ["all"]\non = ["bench:*"]\n'
    write_whole(grants, "\n".join(["format = 1", *each, last]).encode())
    return tokens, grants, token


def request(*headers: str) -> bytes:
    """A publish of one message of 100 bytes."""
    body = AVRO.encode_publish(PublishRequest(payloads(1, 100)))
    return post(path("t", "publish"), body, [AVRO_TYPE, *headers])


def measured(running: Daemon, asked: bytes) -> tuple[float, float]:
    """Publishes a second, and microseconds of processor time for each."""
    before_s = running.cpu_s()
    with load(running.port, CONNECTIONS, asked, SECONDS, warm_up=500) as loading:
        result = loading.end()
    count = result["requests"] if "requests" in result else sum(result["statuses"].values())
    return count / SECONDS, (running.cpu_s() - before_s) / count * 1e6


def main(rounds: int) -> None:
    """Measures so many rounds, and prints each and the medians."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        folder = Path(directory)
        tokens, grants, token = files(folder)
        plain = stack.enter_context(daemon(folder / "plain"))
        named = stack.enter_context(
            daemon(
                folder / "named",
                security_authentication="required",
                security_tokens_file=tokens,
                security_grants_file=grants,
            )
        )
        authorization = f"Authorization: Bearer {token}"
        plain.create("t")
        connection = HTTPConnection("127.0.0.1", named.port)
        connection.request("PUT", path("t"), headers={"Authorization": f"Bearer {token}"})
        assert connection.getresponse().status == 200
        rates, costs = [], []
        for number in range(rounds):
            turns = [(plain, request()), (named, request(authorization))]
            swapped = number % 2 == 1  # what the first leaves to do falls on the second
            first, second = (measured(*turn) for turn in (turns[::-1] if swapped else turns))
            without, with_names = (second, first) if swapped else (first, second)
            rates.append(with_names[0] / without[0])
            costs.append(with_names[1] / without[1])
            print(json.dumps({"round": number + 1, "without": without, "with": with_names}), flush=True)
        print(json.dumps({"rate": statistics.median(rates), "processor_time": statistics.median(costs)}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
