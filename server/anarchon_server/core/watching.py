"""What has changed of the runs that match a query, found by looking at the store again and again. Pure.

Imports `limits`, `model` and the records of `store`. No store tells of every change, so a watch
looks, round by round: at the newest runs, on and on for as long as a page has news; at one page of
the older ones, further on with every round, until a pass has seen them all; and at unfinished runs
that neither showed. What it remembers is bounded, and what it forgets it may show twice, never not
at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from anarchon_server.core import limits
from anarchon_server.core.model import Run, RunView
from anarchon_server.core.store import RunQuery

_Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Known:
    """A run as last shown: a digest of it, and when it ended (None: it has not)."""

    digest: int
    ended_at: int | None


class RunWatch:
    """One watch of the runs that match `query`, whose page, states and instance are of no account.

    In turn `next_look` says what to ask the store for (None: this round is over, the next one begins
    with the next call), and `saw`, given the answer, what is news. An unfinished run is news when it
    is seen first, so that nothing falls between a list and a watch; one that has ended only if it
    ended since the watch began. A lease that was renewed is no change.

    When a run ended says the store's clock, and it shows later: a commit takes its time, and a store
    may have several clocks. Hence what ended `limits.WATCH_LATE_MAX` ago may still be news.
    """

    def __init__(self, query: RunQuery) -> None:
        self._query = replace(query, limit=limits.PAGE_MAX, after=None)
        self._known: dict[_Key, _Known] = {}
        self._begun_at = self._since = self._pass_from = self._store_at = limits.NEVER
        self._older_than: tuple[int, str] | None = None
        self._beside: _Key = ("", 0)
        self._begin_round()

    def _begin_round(self) -> None:
        self._look: RunQuery | None = None
        self._answered: Callable[[Sequence[RunView], bool], None] = self._newest
        self._heads = 0
        self._shown: set[_Key] = set()
        self._asides: list[_Key] | None = None

    def next_look(self) -> RunQuery | None:
        """What to look at now; None: the round is over."""
        if not self._heads:
            self._look_at_newest(None)
        elif self._look is None:
            self._look_aside()
        look = self._look
        if look is None:
            self._begin_round()
        return look

    def _look_at_newest(self, after: tuple[int, str] | None) -> None:
        self._heads += 1
        self._look = replace(self._query, after=after)
        self._answered = self._newest

    def _look_aside(self) -> None:
        """At one of the unfinished runs that this round has not shown, seen longest ago first."""
        if self._asides is None:
            unseen = (
                key
                for key, known in self._known.items()
                if known.ended_at is None and key not in self._shown
            )
            self._asides = list(islice(unseen, limits.WATCH_ASIDES))[::-1]
        if self._asides:
            self._beside = job, slot = self._asides.pop()
            self._look = replace(self._query, job=job, slot=slot)
            self._answered = self._aside

    def saw(self, views: Sequence[RunView], store_at: int) -> list[RunView]:
        """What is news of the answer to the last look."""
        self._took_place(store_at)
        news = [view for view in views if self._is_news(view)]
        self._look = None
        self._answered(views, bool(news))
        return news

    def _took_place(self, store_at: int) -> None:
        """What ended since the watch, and the pass, began counts also where the clock went back."""
        if store_at < self._store_at:
            self._begun_at = min(self._begun_at, store_at - limits.EARLY_MAX)
            self._since = min(self._since, store_at - limits.WATCH_LATE_MAX)
            self._pass_from = self._since
        self._store_at = store_at

    def _is_news(self, view: RunView) -> bool:
        run = view.run
        key = (run.job, run.slot)
        self._shown.add(key)
        ended_at = (run.ended_at or 0) if run.state.final else None
        if ended_at is not None and ended_at < self._since and key not in self._known:
            return False
        known = _Known(_digest(run), ended_at)
        before = self._known.pop(key, None)
        self._known[key] = known
        if len(self._known) > limits.WATCH_KNOWN_MAX:
            del self._known[next(iter(self._known))]
        if before is None:
            return ended_at is None or ended_at >= self._begun_at
        return before.digest != known.digest

    def _newest(self, views: Sequence[RunView], news: bool) -> None:
        """A page of the newest: the next one too if this had news, else on with the older ones."""
        if len(views) < limits.PAGE_MAX:
            self._pass_over()
            return
        end = (views[-1].run.slot, views[-1].run.job)
        if news and self._heads < limits.WATCH_HEADS_MAX:
            self._look_at_newest(end)
            return
        if self._older_than is None or end < self._older_than:
            self._older_than = end
        self._look = replace(self._query, after=self._older_than)
        self._answered = self._older

    def _older(self, views: Sequence[RunView], _news: bool) -> None:
        if len(views) < limits.PAGE_MAX:
            self._pass_over()
        else:
            self._older_than = (views[-1].run.slot, views[-1].run.job)

    def _aside(self, views: Sequence[RunView], _news: bool) -> None:
        if not views:  # pruned meanwhile
            self._known.pop(self._beside, None)

    def _pass_over(self) -> None:
        """Every run has been looked at since the pass began: what ended before then has been shown."""
        self._since = self._pass_from
        self._pass_from = self._store_at - limits.WATCH_LATE_MAX
        self._begun_at = 0  # of what had ended before, this pass has seen all that there was
        self._older_than = None
        for key, known in tuple(self._known.items()):
            if known.ended_at is not None and known.ended_at < self._since:
                del self._known[key]


def _digest(run: Run) -> int:
    return hash(replace(run, lease=None))
