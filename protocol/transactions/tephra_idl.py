"""What Tephra's transaction service offers over Thrift: its methods, their arguments and the errors they declare.

Releases 0.4 to 0.16 are served alike: newer clients call the methods that name a client and throw, older ones the
others. Arguments have the ids 1, 2, …; a result has id 0, a declared error its place among the method's errors.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import ClassVar, NamedTuple


class Kind(Enum):
    """What an argument or a result is."""

    VOID = auto()
    BOOL = auto()
    #: A struct around one bool, for clients that could not tell false from nothing.
    BOXED_BOOL = auto()
    I32 = auto()
    I64 = auto()
    TEXT = auto()
    BINARY = auto()
    #: A set of byte strings: what a transaction changed.
    KEYS = auto()
    #: A set of 64-bit numbers.
    POINTERS = auto()
    TRANSACTION = auto()


class Declared(Exception):
    """An error of Tephra's interface; its arguments are the fields of the struct, ids 1, 2, …, in order."""

    name: ClassVar[str]

    @property
    def message(self) -> str:
        """What it says."""
        return " ".join(str(value) for value in self.args if value is not None)


class NotInProgress(Declared):
    """Text: the transaction is not, or no longer, in progress."""

    name = "TTransactionNotInProgressException"


class Conflict(Declared):
    """Transaction id, the key, the other's client id or None."""

    name = "TTransactionConflictException"


class Generic(Declared):
    """Text, and the name of a Java class that clients throw again."""

    name = "TGenericException"


class CouldNotTakeSnapshot(Declared):
    """Text."""

    name = "TTransactionCouldNotTakeSnapshotException"


class InvalidTruncateTime(Declared):
    """Text: transactions older than that are in progress."""

    name = "TInvalidTruncateTimeException"


ILLEGAL_ARGUMENT = "java.lang.IllegalArgumentException"
TOO_LARGE = "org.apache.tephra.TransactionSizeException"


class Method(NamedTuple):
    """One method: kinds of its arguments and its result, and the errors it declares."""

    args: tuple[Kind, ...]
    result: Kind
    throws: tuple[type[Declared], ...] = ()


_TX = Kind.TRANSACTION

METHODS: dict[str, Method] = {
    "startLong": Method((), _TX),
    "startLongClientId": Method((Kind.TEXT,), _TX, (Generic,)),
    "startShort": Method((), _TX),
    "startShortClientId": Method((Kind.TEXT,), _TX, (Generic,)),
    "startShortTimeout": Method((Kind.I32,), _TX),
    "startShortWithTimeout": Method((Kind.I32,), _TX, (Generic,)),
    "startShortWithClientIdAndTimeOut": Method((Kind.TEXT, Kind.I32), _TX, (Generic,)),
    "canCommitTx": Method((_TX, Kind.KEYS), Kind.BOXED_BOOL, (NotInProgress,)),
    "canCommitOrThrow": Method((Kind.I64, Kind.KEYS), Kind.VOID, (NotInProgress, Conflict, Generic)),
    "commitTx": Method((_TX,), Kind.BOXED_BOOL, (NotInProgress,)),
    "commitOrThrow": Method((Kind.I64, Kind.I64), Kind.VOID, (NotInProgress, Conflict, Generic)),
    "abortTx": Method((_TX,), Kind.VOID),
    "invalidateTx": Method((Kind.I64,), Kind.BOOL),
    "checkpoint": Method((_TX,), _TX, (NotInProgress,)),
    "getSnapshot": Method((), Kind.BINARY, (CouldNotTakeSnapshot,)),
    "resetState": Method((), Kind.VOID),
    "status": Method((), Kind.TEXT),
    "invalidTxSize": Method((), Kind.I32),
    "truncateInvalidTx": Method((Kind.POINTERS,), Kind.BOXED_BOOL),
    "truncateInvalidTxBefore": Method((Kind.I64,), Kind.BOXED_BOOL, (InvalidTruncateTime,)),
    "pruneNow": Method((), Kind.VOID),
}
