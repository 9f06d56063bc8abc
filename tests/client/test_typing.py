"""Types of the client as a type checker infers them: values from the serializer, options from their names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Exactly the lines that end in ``# refused`` must be errors; ``# is T`` gives the type of the line's expression.
PROGRAM = """
from dataclasses import dataclass
from plainsong import JSON, AsyncClient, Client, Message, Outgoing, errors

@dataclass
class Order:
    number: int

def untyped(message: Message) -> None: ...

def program(client: Client) -> None:
    client.publish("t", 17)  # refused
    client.publish("t", "text")  # refused
    client.publish("t", b"x")
    client.publish("t", [b"x", Outgoing(b"y", ttl_s=5)])
    client.publish("t", (b"%d" % number for number in range(3)))
    client.publish("t", Order(1), serializer=Order)
    client.publish("t", [Order(1)], serializer=Order)
    client.publish("t", {"any": 1}, serializer=JSON)
    client.publish("t", b"x", rety_unknown=True)  # refused
    client.topic("t").publish(b"x", ttl=5)  # refused
    client.topic("t").publisher(linger=5)  # refused
    client.create_topic("t", ttl=5)  # refused
    client.admin.set_properties("t", ttl_s=5, max_bytes=None)
    client.read("t", folow=True)  # refused
    for order in client.read("t", serializer=Order):
        reveal_type(order.value)  # is Order
        untyped(order)
    for plain in client.read("t"):
        reveal_type(plain.value)  # is bytes
    reveal_type(client.poll("t", serializer=str)[0].value)  # is str
    reveal_type(client.topic("t").poll(serializer=(bytes, float))[0].value)  # is float
    reveal_type(client.admin.stats("t")["messages"])  # is int
    reveal_type(client.stream("t").publish(b"x").result())  # is Receipt
    reveal_type(client.publisher("t").send(b"x").result())  # is MessageId
    client.admin.stats("t")["mesages"]  # refused
    reveal_type(client.admin.overview()["topics"][0]["publishPerSecond"])  # is float
    reveal_type(client.admin.producers("t")["producers"][0]["persisted"])  # is int
    reveal_type(client.admin.namespaces.show()["deduplication"]["enabled"])  # is bool
    client.admin.attention()[0]["sevrity"]  # refused
    client.admin.reader("t", "r")["positon"]  # refused
    with client.transaction() as tx:
        tx.publish("t", 17)  # refused
        tx.publish("t", Order(1), serializer=Order)
    raise errors.NotSent(1, 0)

async def same(client: AsyncClient) -> None:
    await client.publish("t", 17)  # refused
    async for order in client.read("t", serializer=Order):
        reveal_type(order.value)  # is Order
"""


def test_a_type_checker_refuses_the_same_arguments_as_the_client_and_infers_the_values(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--hide-error-context",
        "--no-pretty",
        "--no-color-output",
        "--config-file=",
    ]
    done = subprocess.run([*mypy, str(program)], cwd=ROOT, capture_output=True, text=True, check=False)
    # mypy's cache contains the path of the first program with the same content.
    said = re.findall(r"^.*program\.py:(\d+): (error|note): (.*)$", done.stdout, re.MULTILINE)
    refused = {int(line) for line, kind, _ in said if kind == "error"}
    types = {int(line): text for line, _, text in said if text.startswith("Revealed type")}
    lines = list(enumerate(PROGRAM.splitlines(), start=1))
    assert refused == {number for number, line in lines if line.endswith("# refused")}, done.stdout
    expected = {number: line.rpartition("# is ")[2] for number, line in lines if "# is " in line}
    shown = {number: re.sub(r'.*"(?:\w+\.)*(\w+)".*', r"\1", text) for number, text in types.items()}
    assert shown == expected, done.stdout


#: Complete programs; their own functions need no annotations.
GUIDES = ("docs/client.md", "docs/howto/read-committed.md")
PROGRAMS = {
    f"{guide.rpartition('/')[2].removesuffix('.md').replace('-', '_')}_{number}.py": program
    for guide in GUIDES
    for number, program in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / guide).read_text(encoding="utf-8"), re.DOTALL)
    )
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("programs")
    for name, program in PROGRAMS.items():
        (directory / name).write_text(program)
    return directory


def test_mypy_accepts_the_programs_of_the_guides(programs):
    options = ["--strict", "--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls", "--config-file="]
    files = [str(programs / name) for name in PROGRAMS]
    words = [sys.executable, "-m", "mypy", *options, "--no-pretty", "--no-color-output", *files]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_pyright_accepts_the_programs_of_the_guides(programs):
    found = shutil.which("basedpyright") or shutil.which("pyright")
    if found is None:
        pytest.skip("NOT TESTED: there is no pyright or basedpyright here")
    settings = {"include": [str(programs)], "typeCheckingMode": "standard", "extraPaths": [str(ROOT)]}
    (programs / "pyrightconfig.json").write_text(json.dumps(settings))
    words = [found, "--project", str(programs), "--pythonpath", sys.executable]
    done = subprocess.run(words, cwd=programs, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
