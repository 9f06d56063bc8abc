"""What went wrong in Spark, in one line: the reason, out of two languages' tracebacks."""

from __future__ import annotations

import re

from plainsong.cli.verb import CommandFailed, Exit, one_line

#: The last line of a Python traceback; the first of a Java one.
_REASON = re.compile(
    r"^(?:Caused by: )?((?:[\w$]+\.)*[A-Z]\w*(?:Error|Exception|Failed|NotFound|Lost|Warning)): (\S.*)$", re.M
)
#: Classes that only say that something else went wrong.
_WRAPPERS = ("SparkException", "Py4JJavaError", "StreamingQueryException", "PythonException", "AnalysisException")
MAX_CHARS = 600


def reason_of(error: BaseException) -> str:
    """The line that says why: the innermost Python error in the text, else the first line."""
    text = str(error)
    said = [(name.rpartition(".")[2], reason) for name, reason in _REASON.findall(text)]
    inner = [f"{name}: {reason}" for name, reason in said if name not in _WRAPPERS]
    found = inner[0] if inner else next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return one_line(found)[:MAX_CHARS]


def failure_of_spark(error: BaseException) -> CommandFailed:
    """What the program says of an error of Spark's."""
    return CommandFailed(reason_of(error), hint="the whole of it: --trace", code=Exit.FAILED)


def is_of_spark(error: BaseException) -> bool:
    """Whether it comes from pyspark or the JVM behind it."""
    return type(error).__module__.split(".")[0] in ("pyspark", "py4j")
