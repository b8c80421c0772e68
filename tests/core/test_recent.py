"""Recent forgets the least recently used, and nothing else."""

from __future__ import annotations

import threading

from gradtruth.core.recent import Recent


def test_forgets_the_least_recently_used() -> None:
    cache: Recent[int] = Recent(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c"), len(cache)) == (1, None, 3, 2)
    cache.clear()
    assert (cache.get("a"), len(cache)) == (None, 0)


def test_threads_may_share_one() -> None:
    cache: Recent[int] = Recent(8)
    wrong: list[object] = []

    def work(offset: int) -> None:
        for n in range(3000):
            key = (n + offset) % 16
            cache.put(key, key)
            if cache.get(key) not in (key, None):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(cache) == 8
