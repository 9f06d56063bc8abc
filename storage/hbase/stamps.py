"""Stamps: whose commit a row or cell of HBase is of, and what a topic's head says of those that count.

    stamp     epoch:u64 serial:u64      the owner's epoch, and the number of its commit; 0 0: nobody's, counts always
    head      01 stamp stamp            the last commit of the owner that is; the last one of the owner before
    fence     serial:u64                of an epoch: the last commit that counts

Everything of a commit carries its stamp, and counts from the moment on in which the head says so. Whatever is put
later under a stamp that the head has passed by, or in an epoch without a fence, counts for nothing and never will.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from protocol.keys import DamagedRow

if TYPE_CHECKING:
    from collections.abc import Mapping

STAMP = struct.Struct(">QQ")
_HEAD = struct.Struct(">BQQQQ")
_FORMAT = 1
_SERIAL = struct.Struct(">Q")


class Stamp(NamedTuple):
    """Of which commit something is."""

    epoch: int
    serial: int
    """From 1; 0: before the first commit of the epoch."""

    def encode(self) -> bytes:
        """As cells begin."""
        return STAMP.pack(*self)


NOBODYS = Stamp(0, 0)


def encode_serial(serial: int) -> bytes:
    """A fence's value."""
    return _SERIAL.pack(serial)


def decode_serial(value: bytes) -> int:
    """Read it. Raises DamagedRow."""
    if len(value) != _SERIAL.size:
        raise DamagedRow(f"a fence has {len(value)} bytes")
    serial: int = _SERIAL.unpack(value)[0]
    return serial


@dataclass(frozen=True, slots=True)
class Head:
    """What decides whose rows of a topic count."""

    last: Stamp = NOBODYS
    """The owner's last commit."""
    before: Stamp = NOBODYS
    """The last commit of the last owner before that had any."""
    fences: Mapping[int, int] = field(default_factory=dict)
    """Of owners before that one: epoch → serial of the last commit."""

    def encode(self) -> bytes:
        """The cell, without the fences: they have cells of their own."""
        return _HEAD.pack(_FORMAT, *self.last, *self.before)

    @classmethod
    def decode(cls, cell: bytes | None, fences: Mapping[int, int]) -> Head:
        """Read the cell; None: the topic was never claimed. Raises DamagedRow."""
        if cell is None:
            return cls()
        if len(cell) != _HEAD.size or cell[0] != _FORMAT:
            raise DamagedRow(f"a head of {len(cell)} bytes begins with {cell[:1].hex()}")
        _, epoch, serial, epoch_before, serial_before = _HEAD.unpack(cell)
        return cls(Stamp(epoch, serial), Stamp(epoch_before, serial_before), fences)

    def claimed(self, epoch: int) -> Head:
        """The head of the next owner, who has committed nothing yet."""
        if not self.last.serial:
            return Head(Stamp(epoch, 0), self.before, self.fences)
        fences = {**self.fences, self.before.epoch: self.before.serial} if self.before.epoch else self.fences
        return Head(Stamp(epoch, 0), self.last, fences)

    def committed(self) -> Head:
        """The head after the owner's next commit."""
        return replace(self, last=Stamp(self.last.epoch, self.last.serial + 1))

    def counts(self, stamp: Stamp) -> bool:
        """Whether what carries ``stamp`` is of a commit that took place."""
        for known in (self.last, self.before):
            if stamp.epoch == known.epoch:
                return stamp.serial <= known.serial
        return stamp == NOBODYS or stamp.serial <= self.fences.get(stamp.epoch, 0)

    def tells(self, stamp: Stamp) -> bool | None:
        """What became of a commit of an earlier owner; None: it is too long ago to be told, or not over.

        No later attempt of it can take place any more, once this is the head.
        """
        if stamp.epoch >= self.last.epoch:
            return None
        known = {self.before.epoch: self.before.serial, **self.fences}
        return stamp.serial <= known[stamp.epoch] if stamp.epoch in known else None

    def is_void(self, stamp: Stamp) -> bool:
        """Whether it will never count: its owner was replaced before the commit took place."""
        return stamp.epoch < self.last.epoch and not self.counts(stamp)
