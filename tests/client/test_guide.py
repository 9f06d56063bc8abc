"""Every Python example of docs/client.md, of the README and of the distribution's README runs against a real daemon.

tests/spark/test_read_guide.py runs the README's examples for Spark, and tests/howto/test_howto.py those for PostgreSQL.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.daemon.harness import run_python
from tests.patience import PATIENCE_S

GUIDE = Path(__file__).parents[2] / "docs" / "client.md"
README = GUIDE.parents[1] / "README.md"
#: The README that package indexes show.
DISTRIBUTION = GUIDE.parents[1] / "etc/dist/client/README.md"
EXAMPLES = [
    example
    for document in (README, GUIDE, DISTRIBUTION)
    for example in re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    if "spark." not in example and "sqlalchemy" not in example
]
#: The output of examples for which it matters.
SAYS = {
    '"greetings", start="oldest"': "b'world'",
    "AsyncClient": "b'third'",
    "futures": "0000",
    "best_effort": "0",
    "no-such-topic": "topic_not_found not-applied",
    "page.last_id": "more",
    "shop-*": "shop-returns b'hello'",
    "FilePosition": "[]",
    "Undecodable": "skipped",
    "about to pay": "[b'about to pay', b'paid 12.50']",
    "Ledger": "12.50",
    "TransactionInDoubt": "committed",
    "run_in_transaction": "paid",
    "slow client": "held 1 slow client",
    "ServerPosition": "[b'3', b'5']",
    "client.store": "committed",
    "meter-7": "0 False 4",
    "producer.begin": "committed 2 ['account-12', 'account-12', 'account-13', 'account-13', 'account-14', 'account-14']",
    "publish_file": "[b'one', b'two', b'three']",
    "add_up": "42 42",
    "client.admin.events": "attention ",  # the number depends on the disk and on other tests' transactions
    "verify_chain": "True found",
    "Outgoing": "(b'gone in a minute', 60000), (b'gone in an hour', 3600000)",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_guide_do_what_they_show(example: str, shared_url: str, tmp_path: Path):
    environ = {"PLAINSONG_URL": shared_url, "PLAINSONG_NAMESPACE": "guide"}
    # The examples use the default address, where a reader's own daemon listens.
    run = re.sub(r"Client\((\"http://127.0.0.1:7420\")?\)", "Client.from_environment()", example)
    program = tmp_path / "example.py"
    program.write_text(f'import warnings\nwarnings.simplefilter("error")\n{run}', encoding="utf-8")
    done = run_python(program, cwd=tmp_path, environ=environ, timeout_s=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for mark, said in SAYS.items():
        if mark in example:
            assert said in done.stdout


def test_the_guide_has_an_example_of_each_kind():
    assert all(any(mark in example for example in EXAMPLES) for mark in SAYS)


def test_tables_and_text_name_only_what_exists():
    import plainsong.errors

    for name in re.findall(
        r"`([A-Z][A-Za-z]+(?:Error|Failed|Lost|Exceeded|Sent|Full|Changed|NotFound|TooLarge))`", GUIDE.read_text()
    ):
        assert hasattr(plainsong.errors, name), name
