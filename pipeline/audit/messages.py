"""What an audit message says: the shape of version 1, its bounds, and the reasons for which one is set aside.

A message is one JSON object in UTF-8. Fields that the shape does not name are ignored: a later publisher may add some
without a new version. docs/pipeline.md describes the shape for those who publish.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import ArrayType, MapType, StringType, StructField, StructType

VERSION: Final = 1

ACCESS: Final = "access"
METADATA: Final = "metadata"
TYPES: Final = (ACCESS, METADATA)

READ: Final = "read"
WRITE: Final = "write"
UNKNOWN: Final = "unknown"
ACCESSES: Final = (READ, WRITE, UNKNOWN)

#: An entity is called `kind:name`; what programs access is of this kind.
DATASET: Final = "dataset"
PROGRAM: Final = "program"

#: The strings every message has, and those of an access besides.
COMMON_NAMES: Final = ("namespace", "user")
ACCESS_NAMES: Final = ("program", "run", "dataset")
#: The parts of a metadata change: what there was, what came, what went.
CHANGES: Final = ("previous", "added", "removed")

#: Names are of 1 to 1024 characters, none of them a control character. Java and Python read these alike.
NAME_PATTERN: Final = r"[^\x00-\x1f\x7f]{1,1024}"
ENTITY_PATTERN: Final = r"[a-z][a-z0-9_]{0,31}:[^\x00-\x1f\x7f]{1,1024}"

#: Before 2000 nobody published; and no event is known a day before it happens.
EARLIEST_MS: Final = 946_684_800_000
MAX_AHEAD_MS: Final = 86_400_000

#: Why a message is a dead letter. `detail` says which field, or what stood there.
REASONS: Final = {
    "not_utf8": "the payload is no text in UTF-8",
    "not_json": "the text is not one JSON value (a name given twice is none either)",
    "not_an_object": "the value is a list, a string, a number or a constant",
    "missing_field": "a field is missing or null; `detail` names it",
    "wrong_type": "a field has another type; `detail` names it",
    "bad_value": "a name is empty, too long or has control characters, or an access is of no known kind",
    "unknown_version": "the version is not 1; `detail` has it",
    "unknown_type": "the type is neither access nor metadata; `detail` has it",
    "absurd_time": "the time lies before 2000 or more than a day after the publication; `detail` has it",
}

#: One part of a metadata change.
CHANGE: Final = StructType(
    [
        StructField("properties", MapType(StringType(), StringType())),
        StructField("tags", ArrayType(StringType())),
    ]
)
