"""Tephra's interface in thriftpy2, as a reference for encodings and as a client, and strategies for transactions."""

import io
from typing import Any

from hypothesis import strategies as st
from thriftpy2.parser import parse_fp
from thriftpy2.protocol.binary import TBinaryProtocol
from thriftpy2.transport import TMemoryBuffer

from plainsong.protocol.transactions.transaction import Transaction, TransactionType, VisibilityLevel

IDL = """
struct TTransaction {
  1: i64 transactionId, 2: i64 readPointer, 3: list<i64> invalids, 4: list<i64> inProgress, 5: i64 firstShort,
  6: i32 type, 7: i64 writePointer, 8: list<i64> checkpointWritePointers, 9: i32 visibilityLevel
}
struct TBoolean { 1: bool value }
exception NotInProgress { 1: string message }
exception Conflict { 1: i64 transactionId, 2: string conflictingKey, 3: string conflictingClient }
exception CouldNotTakeSnapshot { 1: string message }
exception InvalidTruncateTime { 1: string message }
exception Generic { 1: string message, 2: string originalExceptionClass }
service TTransactionServer {
  TTransaction startLong(),
  TTransaction startLongClientId(1: string clientId) throws (1: Generic e),
  TTransaction startShort(),
  TTransaction startShortClientId(1: string clientId) throws (1: Generic e),
  TTransaction startShortTimeout(1: i32 timeout),
  TTransaction startShortWithTimeout(1: i32 timeout) throws (1: Generic e),
  TTransaction startShortWithClientIdAndTimeOut(1: string clientId, 2: i32 timeout) throws (1: Generic e),
  TBoolean canCommitTx(1: TTransaction tx, 2: set<binary> changes) throws (1: NotInProgress e),
  void canCommitOrThrow(1: i64 tx, 2: set<binary> changes) throws (1: NotInProgress e, 2: Conflict c, 3: Generic g),
  TBoolean commitTx(1: TTransaction tx) throws (1: NotInProgress e),
  void commitOrThrow(1: i64 txId, 2: i64 wp) throws (1: NotInProgress e, 2: Conflict c, 3: Generic g),
  void abortTx(1: TTransaction tx),
  bool invalidateTx(1: i64 txid),
  TTransaction checkpoint(1: TTransaction tx) throws (1: NotInProgress e),
  binary getSnapshot() throws (1: CouldNotTakeSnapshot e),
  void resetState(),
  string status(),
  i32 invalidTxSize(),
  TBoolean truncateInvalidTx(1: set<i64> txns),
  TBoolean truncateInvalidTxBefore(1: i64 timeMillis) throws (1: InvalidTruncateTime e),
  void pruneNow(),
  void unknownToTephra()
}
"""
TEPHRA = parse_fp(io.StringIO(IDL), "tephra_for_tests_thrift")
TTransaction = TEPHRA.TTransaction

i64 = st.integers(-(2**63), 2**63 - 1)
pointers = st.lists(i64, max_size=20).map(lambda found: tuple(sorted(found)))
transactions = st.builds(
    Transaction,
    read_pointer=i64,
    transaction_id=i64,
    write_pointer=i64.filter(bool),
    invalids=pointers,
    in_progress=pointers,
    first_short_in_progress=i64,
    type=st.sampled_from(TransactionType),
    checkpoint_write_pointers=pointers,
    visibility_level=st.sampled_from(VisibilityLevel),
)


def struct_bytes(struct: Any) -> bytes:
    """Encode a struct with thriftpy2."""
    out = TMemoryBuffer()
    TBinaryProtocol(out).write_struct(struct)
    return bytes(out.getvalue())


def read_struct(struct: Any, data: bytes) -> Any:
    """Decode a struct with thriftpy2."""
    TBinaryProtocol(TMemoryBuffer(data)).read_struct(struct)
    return struct


def struct_of(tx: Transaction) -> Any:
    """Convert a transaction to thriftpy2's struct."""
    return TTransaction(
        transactionId=tx.transaction_id,
        readPointer=tx.read_pointer,
        invalids=list(tx.invalids),
        inProgress=list(tx.in_progress),
        firstShort=tx.first_short_in_progress,
        type=int(tx.type),
        writePointer=tx.write_pointer,
        checkpointWritePointers=list(tx.checkpoint_write_pointers),
        visibilityLevel=int(tx.visibility_level),
    )
