"""Trains on each batch more than once, in a fixed order."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PassBuffer(Generic[T]):
    """A circular buffer of train batches, as of IMPACT (Luo et al. 2020, arXiv:1912.00167, 3.2).

    Its slots are visited in turn. An empty slot is filled with a new batch; each visit hands the
    slot's batch out, and after `passes` visits the slot is empty again. With 2 slots and 2 passes
    the batches come as A B A B C D C D.

    Args:
      take: gives the next batch.
      slots: batches held at once; batches of a round are `slots` learner steps apart.
      passes: how often each is handed out.
      warm_start: the first batch gets one pass, the next two, and so on up to `passes`, so that
        the slots do not all run out in the same round.
    """

    def __init__(
        self, take: Callable[[], T], slots: int, passes: int, *, warm_start: bool = False
    ) -> None:
        self._take = take
        self._slots: list[tuple[T, int] | None] = [None] * slots
        self._next = 0
        self._passes = passes
        self._granted = 1 if warm_start else passes

    def next(self) -> tuple[T, bool]:
        """The next batch, and whether this is its last pass.

        If `take` raises, nothing has changed.
        """
        index = self._next
        slot = self._slots[index]
        if slot is None:
            batch, left = self._take(), self._granted
            self._granted = min(self._granted + 1, self._passes)
        else:
            batch, left = slot
        left -= 1
        self._slots[index] = (batch, left) if left else None
        self._next = (index + 1) % len(self._slots)
        return batch, not left

    @property
    def held(self) -> list[T]:
        """Batches that have passes left."""
        return [slot[0] for slot in self._slots if slot is not None]
