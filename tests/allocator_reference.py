"""The CUDA caching allocator once more, written to be read and not to be fast: lists, searched from the front.

After c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch 2.13; one stream.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from gpumem_nb.shared.allocator_settings import AllocatorSettings

MIB = 2**20
FREE, USED, UNMAPPED = "free", "used", "unmapped"


@dataclass(eq=False)
class Piece:
    """Of a segment."""

    size: float
    state: str
    freed_at: int = 0


@dataclass(eq=False)
class Segment:
    """Its pieces in the order of their addresses."""

    small: bool
    grows: bool
    pieces: list[Piece] = field(default_factory=list)

    @property
    def page(self) -> int:
        return 2 * MIB if self.small else 20 * MIB

    def neighbour(self, piece: Piece, steps: int) -> Piece | None:
        at = self.pieces.index(piece) + steps
        return self.pieces[at] if 0 <= at < len(self.pieces) else None

    def split(self, piece: Piece, size: float) -> Piece:
        rest = Piece(piece.size - size, piece.state, piece.freed_at)
        self.pieces.insert(self.pieces.index(piece) + 1, rest)
        piece.size = size
        return rest

    def tidy(self) -> None:
        at = 1
        while at < len(self.pieces):
            left, right = self.pieces[at - 1], self.pieces[at]
            if left.state == right.state != USED:
                left.size += right.size
                left.freed_at = max(left.freed_at, right.freed_at)
                del self.pieces[at]
            else:
                at += 1


class Reference:
    """What is reserved after each allocation and release."""

    def __init__(self, settings: AllocatorSettings, limit: int | None) -> None:
        self._settings = settings
        self._limit = limit
        self._segments: list[Segment] = []
        self._searches = {True: 0, False: 0}
        self.reserved = self.peak = 0
        self.over_limit = 0

    def allocate(self, nbytes: int) -> tuple[Segment, Piece]:
        size = self._rounded(nbytes)
        small = size <= MIB
        asked = 2 * MIB if small else 20 * MIB if size < 10 * MIB else math.ceil(size / (2 * MIB)) * 2 * MIB
        found = self._best_fit(size, small)
        if found is None:
            self._collect()
            if self._passes(asked):
                self._release_oversize(size, small)
            if self._passes(asked):
                self._release_all()
            self.over_limit += self._passes(asked)
            found = self._grown(size, small) if self._settings.expandable_segments else self._new(asked, small)
        segment, piece = found
        rest = piece.size - size
        greedy = small or self._settings.expandable_segments
        if rest >= 512 if greedy else size < self._max_split and rest > MIB:
            segment.split(piece, size).freed_at = self._searches[small]
        piece.state = USED
        return segment, piece

    def release(self, segment: Segment, piece: Piece) -> None:
        piece.state = FREE
        for at in (-1, 1):
            other = segment.neighbour(piece, at)
            if other and other.state == FREE:
                other.freed_at = self._searches[segment.small]
        piece.freed_at = self._searches[segment.small]
        segment.tidy()

    @property
    def _max_split(self) -> float:
        size = self._settings.max_split_size_mb
        return math.inf if size is None else size * MIB

    def _passes(self, asked: int) -> bool:
        return self._limit is not None and self.reserved + asked > self._limit

    def _rounded(self, nbytes: int) -> int:
        parts = self._settings.roundup_power2_divisions
        if parts > 1 and nbytes > 512 * parts:
            step = (1 << nbytes.bit_length() - 1) // parts
            return math.ceil(nbytes / step) * step
        return max(512, math.ceil(nbytes / 512) * 512)

    def _free(self, small: bool) -> list[tuple[Segment, Piece]]:
        """By size, then by address."""
        pieces = [(s, p) for s in self._segments if s.small == small for p in s.pieces if p.state == FREE]
        return sorted(pieces, key=lambda pair: pair[1].size)

    def _best_fit(self, size: int, small: bool) -> tuple[Segment, Piece] | None:
        self._searches[small] += 1
        fitting = [pair for pair in self._free(small) if pair[1].size >= size]
        if not fitting:
            return None
        at = 0
        if self._settings.expandable_segments:
            while at + 1 < len(fitting) and self._room(*fitting[at + 1]) < self._room(*fitting[at]):
                at += 1
        segment, piece = fitting[at]
        if size < self._max_split and piece.size >= self._max_split:
            return None
        if size >= self._max_split and piece.size >= size + 20 * MIB:
            return None
        return segment, piece

    def _room(self, segment: Segment, piece: Piece) -> float:
        after = segment.neighbour(piece, 1)
        return piece.size + (after.size if after and after.state == UNMAPPED else 0)

    def _new(self, size: int, small: bool) -> tuple[Segment, Piece]:
        segment = Segment(small, False, [Piece(size, FREE)])
        self._segments.append(segment)
        self._reserve(size)
        return segment, segment.pieces[0]

    def _reserve(self, nbytes: float) -> None:
        self.reserved += int(nbytes)
        self.peak = max(self.peak, self.reserved)

    def _grown(self, size: int, small: bool) -> tuple[Segment, Piece]:
        """Map pages at the lowest address where the size fits between used pieces."""
        segment = next((s for s in self._segments if s.small == small and s.grows), None)
        if segment is None:
            segment = Segment(small, True, [Piece(math.inf, UNMAPPED)])
            self._segments.append(segment)
        for first in range(len(segment.pieces)):
            run = list(itertools.takewhile(lambda piece: piece.state != USED, segment.pieces[first:]))
            # A free piece may begin if pages can be mapped right after it.
            if any(piece.state == UNMAPPED for piece in run[:2]) and sum(piece.size for piece in run) >= size:
                break
        missing: float = size
        for piece in run:
            if missing <= 0:
                break
            if piece.state == UNMAPPED:
                pages = math.ceil(min(missing, piece.size) / segment.page) * segment.page
                if pages < piece.size:
                    segment.split(piece, pages)
                piece.state = FREE
                self._reserve(pages)
            missing -= piece.size
        head = run[0]
        segment.tidy()
        return segment, head

    def _drop(self, segment: Segment) -> int:
        self._segments.remove(segment)
        size = int(segment.pieces[0].size)
        self.reserved -= size
        return size

    def _whole(self, small: bool) -> list[Segment]:
        """Free segments that are in one piece, the smallest first."""
        return [segment for segment, _ in self._free(small) if len(segment.pieces) == 1 and not segment.grows]

    def _release_all(self) -> None:
        for small in (True, False):
            for segment in self._whole(small):
                self._drop(segment)
        for segment in self._segments:
            if segment.grows:
                self._unmap(segment)

    def _unmap(self, segment: Segment) -> None:
        for piece in [piece for piece in segment.pieces if piece.state == FREE]:
            address = sum(p.size for p in segment.pieces[: segment.pieces.index(piece)])
            begin = math.ceil(address / segment.page) * segment.page
            end = (address + piece.size) // segment.page * segment.page
            if begin >= end:
                continue
            middle = segment.split(piece, begin - address) if begin > address else piece
            if middle.size > end - begin:
                segment.split(middle, end - begin)
            middle.state = UNMAPPED
            self.reserved -= int(end - begin)
        segment.tidy()

    def _release_oversize(self, size: int, small: bool) -> None:
        if self._max_split == math.inf:
            return
        wanted = max(size, self._max_split)
        free = self._free(small)
        enough = [segment for segment, piece in free if piece.size >= wanted]
        if enough:
            if not enough[0].grows:
                self._drop(enough[0])
            return
        released = 0
        for segment, piece in reversed(free):
            if released >= wanted or piece.size < self._max_split or segment.grows:
                return
            released += self._drop(segment)

    def _collect(self) -> None:
        share = self._settings.garbage_collection_threshold
        if not share or self._limit is None:
            return
        threshold = int(share * self._limit)

        def age(segment: Segment) -> int:
            return self._searches[False] - segment.pieces[0].freed_at

        whole, freed = self._whole(False), True
        while self.reserved > threshold and whole and freed:
            average = sum(map(age, whole)) / len(whole)
            old = [segment for segment in whole if age(segment) >= average]
            for segment in old:
                self._drop(segment)
            whole, freed = [segment for segment in whole if segment not in old], bool(old)
