"""Every function of the daemon that waits for something other than time or a file has tests that end its wait.

The list comes from the code: a function that waits and has no row here fails. ``test_waits.py`` tests readers' waits.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Calls that return only when something else happens, in this process or on another machine.
CALLS = ("wait", "park", "wait_task_rescheduled", "sleep_forever", "until_counted")
#: The functions that wait, by file; and the file of the tests that end their waits.
WAITS = {
    "actors/actor.py": ("Actor._is_over Actor._turn_over Supervision._keep_running Supervision._supervise", "actors/test_topic_actor.py"),
    "actors/directory.py": ("Directory._hand_over Directory.drained Directory.handed_over", "actors/test_owned_actors.py"),
    "actors/lease.py": ("LeaseKeeper.run", "actors/test_standby.py"),
    "actors/log_writer.py": ("LogWriter.secure LogWriter.ship LogWriter.until_logged LogWriter.until_room", "actors/test_second_copy.py"),
    "actors/mailbox.py": ("Future.wait Mailbox._park Mailbox.ask SingleFlight.__call__", "actors/test_mailbox.py"),
    "actors/namespaces.py": ("Namespaces.run", "actors/test_producers_of_instances.py"),
    "actors/pages.py": ("Pages.read Pages.run", "actors/test_pages_ahead.py"),
    "actors/pointers.py": ("PointerIndex.no_writes PointerIndex.quiet PointerIndex.wait", "actors/test_held_waits.py"),
    "actors/replica.py": ("RoutedTransactions._follow", "actors/test_transactions_of_instances.py"),
    "actors/scrub.py": ("Scrub.run", "actors/test_scrub.py"),
    "actors/second_copy.py": ("SecondCopy.finish", "actors/test_second_copy.py"),
    "actors/take_over.py": ("TakeOver.ask TakeOver.pause", "actors/test_standby.py"),
    "actors/tephra.py": ("ForeignTephra.loaded", "actors/test_foreign_tephra.py"),
    "actors/replica_server.py": ("ReplicaServer._change", "actors/test_transactions_of_instances.py"),
    "actors/transaction_actor.py": ("ServiceSupervision.first_load TransactionActor._roll_back", "actors/test_transaction_service.py"),
    "broker/api/messages/holding.py": ("Holds.wait", "broker/test_waits.py"),
    "broker/api/messages/poll.py": ("Polling.look", "broker/test_waits.py"),
    "broker/api/messages/poll_many.py": ("PollingMany._wait_for_any.wait_for_decision_in PollingMany._wait_for_any.wait_for_messages", "broker/test_waits.py"),
    "broker/api/messages/stream.py": ("LocalStream._answer LocalStream._room LocalStream.answers", "broker/test_stream_bounds.py"),
    "broker/api/operations/overview.py": ("Overview._changes", "broker/test_attention.py"),
    "broker/api/topics/stats.py": ("Counting._measured", "broker/test_waits.py"),
    "broker/audit.py": ("Audit.run", "security/test_audit.py"),
    "broker/authority.py": ("Authority.aclose Authority.start", "broker/test_authorities.py"),
    "broker/catalogue.py": ("Catalogue._be_fresh", "broker/test_catalogue.py"),
    "broker/cluster/handover.py": ("Handover._open Handover._seen Rebalance.all_given_away Rebalance.run", "broker/cluster/test_rebalance.py"),
    "broker/cluster/join.py": ("enter.cancel_at_stop", "broker/cluster/test_cluster_routes.py"),
    "broker/cluster/owners.py": ("Attempts._pause", "broker/cluster/test_forwarding.py"),
    "broker/cluster/remote_stream.py": ("RemoteStream._refusal RemoteStream._room RemoteStream.answers RoutedStream._drained RoutedStream.answers", "broker/cluster/test_forwarded_streams.py"),
    "broker/cluster/serve.py": ("Dispatcher._look_many", "broker/cluster/test_many_owners.py"),
    "broker/front/parent.py": ("Answering._unpack_and_publish _FrontEndProcess._begun _FrontEndProcess._run _FrontEndProcess._terminate_at_stop _FrontEndProcess.keep serve_front_ends", "daemon/test_front_ends.py"),
    "broker/http/asgi.py": ("ApplicationCall._receive ApplicationCall._send_body", "broker/test_framing_of_applications.py"),
    "broker/http/budgets.py": ("AnswerBudget.take", "broker/test_answer_budget.py"),
    "broker/http/connection.py": ("Connection.sleep", "broker/test_reactor.py"),
    "broker/http/deadlines.py": ("Deadlines.run", "broker/test_handlers.py"),
    "broker/http/gate.py": ("Gate._linger Gate._pass.counted_receive Gate._pass.marked_send Gate._send_piece", "broker/test_server_bounds.py"),
    "broker/http/handlers.py": ("answer_of", "broker/test_handlers.py"),
    "broker/http/http2/server.py": ("Http2Connection._answer_the_last", "broker/test_http2.py"),
    "broker/http/quart_app.py": ("_Call.handle_messages", "broker/test_half_close.py"),
    "broker/http/server.py": ("_Application.http2 _Server.run", "broker/test_server_bounds.py"),
    "broker/http/tls_socket.py": ("TlsStream._wait", "broker/test_tls.py"),
    "broker/http/websocket.py": ("StreamSocket._watch", "broker/test_stream_bounds.py"),
    "broker/link/client.py": ("Link._answer Link.aclose Link.converse Links.to", "peering/test_link.py"),
    "broker/link/flow.py": ("Inflow.receive Outflow.send", "peering/test_link_streams.py"),
    "broker/link/server.py": ("_ServingSide.leave_at", "peering/test_link.py"),
    "broker/link/wire.py": ("Wire._proven Wire._watch Wire._write Wire.drain", "peering/test_link_wire.py"),
    "broker/main.py": ("_run", "daemon/test_start_stop.py"),
    "broker/membership/membership.py": ("Membership.enter Membership.run", "broker/cluster/test_membership.py"),
    "broker/membership/zookeeper.py": ("ZooKeeper._call", "broker/cluster/test_membership.py"),
    "broker/security/guard.py": ("Guard.moved_from", "security/test_enforcement.py"),
    "broker/security/oidc.py": ("OidcProvider._key_for", "security/test_oidc.py"),
    "broker/security/reload.py": ("SecurityFiles.run", "security/test_enforcement.py"),
    "broker/standby.py": ("run_standby.wait", "daemon/test_taking_over.py"),
    "broker/thrift.py": ("serve_thrift", "broker/test_thrift_server.py"),

    "storage/leveldb/group_commit.py": ("GroupCommit.written", "storage/test_leveldb.py"),
    "storage/leveldb/open_tables.py": ("OpenTables._close", "storage/test_leveldb.py"),
    "storage/replication/counted_store.py": ("CountedStore._seen CountedStore.write CountingOutbox.until_counted", "actors/test_counted_store.py"),
}  # fmt: skip
COUNTED, COPY, STANDBY = (f"actors/test_{name}.py" for name in ("counted_store", "second_copy", "standby"))
#: The events that end a wait for the second copy, for a standby or for a thread, each with its test.
ENDS = {
    "a change waits in the mode sync": {
        "it counts": (COUNTED, "test_a_write_completes_once_its_commit_counts_and_not_before"),
        "the time is over": (COUNTED, "test_an_object_store_that_does_not_answer_in_time_leaves_the_outcome_unknown_and_refuses_the_next"),
        "another process has taken over": (COUNTED, "test_nothing_is_acknowledged_after_another_process_has_ended_the_reign"),
        "the disk lost a commit": (COUNTED, "test_a_sync_that_fails_after_its_commit_was_sent_ends_the_process_and_the_next_takes_it_from_the_log"),
        "sealed volumes are changed": (COUNTED, "test_a_commit_is_looked_at_again_once_its_changes_in_sealed_volumes_are_made"),
        "the daemon stops": (COUNTED, "test_a_write_that_waits_for_the_object_store_ends_with_its_process"),
    },
    "a read waits in the mode sync": {
        "it counts": (COUNTED, "test_a_row_of_the_metadata_is_shown_once_its_commit_counts"),
        "its caller has left": (COUNTED, "test_a_read_that_was_given_up_refuses_no_later_change"),
        "there is no base": (COUNTED, "test_nothing_is_acknowledged_before_the_first_base_is_complete"),
    },
    "the second copy is finished": {
        "everything is stored": (COPY, "test_everything_written_before_a_clean_stop_is_restored_exactly"),
        "commits wait for their interval": (COPY, "test_with_a_setting_at_an_end_of_its_range_everything_is_restored_after_a_restart"),
    },
    "commits wait to be sent": {
        "the object store is back": (COPY, "test_commits_wait_while_the_object_store_is_unavailable_and_then_all_count"),
        "it allows access again": (COPY, "test_temporarily_refused_access_only_delays_the_copy"),
        "the backlog is full": (COPY, "test_commits_over_the_backlog_make_a_gap_and_count_again_after_a_new_base"),
    },
    "a take-over is requested": {
        "it has begun an epoch": (STANDBY, "test_after_a_take_over_every_counted_commit_is_present_and_the_log_continues"),
        "it is refused": (STANDBY, "test_a_take_over_is_refused_before_the_base_is_complete"),
        "its client has left": (STANDBY, "test_a_take_over_whose_client_has_given_up_is_not_retried"),
        "two clients wait for one": (STANDBY, "test_two_clients_that_ask_for_a_take_over_get_the_same_epoch"),
    },
    "a standby waits for the log": {
        "there is more of it": (STANDBY, "test_a_standby_has_everything_that_the_primary_has_sent"),
        "the next segment was removed": (STANDBY, "test_a_standby_whose_next_segment_was_removed_starts_over_from_a_base"),
        "the lease is not renewed": (STANDBY, "test_a_standby_takes_over_once_the_lease_has_expired"),
        "the primary hands over": (STANDBY, "test_a_planned_switch_ends_the_log_cleanly_and_the_primary_can_follow_at_once"),
        "its disk takes writes again": (STANDBY, "test_a_standby_continues_after_its_disk_has_refused_a_write"),
    },
    "a call waits for a thread": {
        "one is free, or its time is over": ("storage/test_threaded.py", "test_a_call_waits_until_the_system_allows_a_thread_and_fails_with_a_hint_if_it_does_not"),
    },
}  # fmt: skip


def waits_of(path: Path) -> set[str]:
    """Return the functions of a file that wait, with the classes and functions around them."""
    found = set()

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inside = (*names, child.name) if is_named else names
            if isinstance(child, ast.Await) and isinstance(child.value, ast.Call):
                called = ast.unparse(child.value.func).rpartition(".")[2]
                if called in CALLS:
                    found.add(".".join(inside))
            visit(child, inside)

    visit(ast.parse(path.read_text(encoding="utf-8")), ())
    return found


def test_every_wait_of_the_daemon_has_a_row():
    files = [path for floor in ("actors", "broker", "storage") for path in sorted((ROOT / floor).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): names for path in files if (names := waits_of(path))}
    assert found == {path: set(functions.split()) for path, (functions, _) in WAITS.items()}
    assert [file for _, file in WAITS.values() if not (ROOT / "tests" / file).exists()] == []


@pytest.mark.parametrize("wait", ENDS)
def test_every_end_of_a_wait_for_the_second_copy_has_its_test(wait):
    for end, (file, name) in ENDS[wait].items():
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (wait, end)
