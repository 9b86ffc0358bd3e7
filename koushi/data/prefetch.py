"""Makes the next step's batch while this step computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar, final

T = TypeVar("T")


@final
class Prefetch(Generic[T]):
    """``get(step)`` gives ``make(step)``, begun in a thread of its own during the step before.

    What ``make`` raises comes out of the ``get`` of that step. Any step may be asked for; one that
    isn't the next is made on the spot. Use it in a ``with``, or call ``close``.
    """

    def __init__(self, make: Callable[[int], T], start: int):
        self._make = make
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="koushi-prefetch")
        self._step = start
        self._next: Future[T] = self._pool.submit(make, start)

    def get(self, step: int) -> T:
        """The result of ``make(step)``."""
        if step != self._step:
            self._next.cancel()
            self._begin(step)
        made = self._next.result()
        self._begin(step + 1)
        return made

    def close(self) -> None:
        """Ends the thread once what it is making is made; may be called again."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self, step: int) -> None:
        self._next = self._pool.submit(self._make, step)
        self._step = step

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
