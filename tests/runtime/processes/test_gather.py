"""Ranks part over a store: who waits for whom, and which reports travel."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from accumlint.runtime.gather import CHUNK, Meeting, Met

torch = pytest.importorskip("torch")


def meet_all(places: list[str], reports: list[bytes], *, absent: tuple[int, ...] = (), patience: float = 30.0) -> list[Met]:
    store: Any = torch.distributed.HashStore()
    store.set_timeout(timedelta(seconds=30))
    ranks = [rank for rank in range(len(places)) if rank not in absent]

    def meet(rank: int) -> Met:
        return Meeting(store, rank, len(places), places[rank]).meet({"rank": rank}, lambda: reports[rank], patience)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(meet, ranks))


def test_ranks_that_share_a_folder_send_nothing() -> None:
    first, *others = meet_all(["here"] * 4, [b""] * 4)
    assert first.reports == ()
    assert [word["rank"] for word in first.words] == [0, 1, 2, 3]
    assert all(met.absent == () for met in (first, *others))


def test_reports_from_elsewhere_come_whole() -> None:
    large = random.Random(0).randbytes(3 * CHUNK + 17)
    first, *_ = meet_all(["here", "there", "here", "far"], [b"0", large, b"2", b"3"])
    assert first.reports == (large, b"3")


@pytest.mark.parametrize("absent", [(2,), (1, 2)])
def test_who_does_not_come_is_named_and_keeps_nobody(absent: tuple[int, ...]) -> None:
    met = meet_all(["here", "there", "there"], [b"0", b"1", b"2"], absent=absent, patience=0.5)
    assert {each.absent for each in met} == {absent}
    assert met[0].reports == ((b"1",) if 1 not in absent else ())


def test_without_rank_0_the_others_go_their_way() -> None:
    met = meet_all(["here", "there"], [b"0", b"1"], absent=(0,), patience=0.3)
    assert [each.absent for each in met] == [(0,)]


def test_over_tcp() -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    client = torch.distributed.TCPStore("127.0.0.1", server.port, 2, is_master=False, timeout=timedelta(seconds=30))
    stores = [torch.distributed.PrefixStore("a", store) for store in (server, client)]
    sent = os.urandom(CHUNK + 1)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda rank: Meeting(stores[rank], rank, 2, f"place-{rank}").meet({"rank": rank}, lambda: sent, 20.0), range(2)
        )
    assert first.reports == (sent,)
    assert second == Met()
