"""LookupServer and LookupClient over real sockets."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvkeep.errors import LookupServiceError
from kvkeep.hashing import Extra
from kvkeep.lookup import server as clears
from kvkeep.lookup.client import LookupClient
from kvkeep.tokens import RequestScope


def test_lookup_finds_pins_and_unpins(start):
    service = start(8)
    target = service.targets[0]
    assert service.client.lookup("r#0", list(range(12))) == 8
    assert target.leases == {"r#0"}
    service.client.unpin(["r#0", "unknown"])
    assert service.client.check()[0].open_leases == 0  # handled in order


def test_fault_28_a_question_that_no_worker_can_read_is_answered_at_once(start):
    """Fault 28: nobody waits for a deadline, and the worker is not taken for a dead one."""
    service = start(8, 8, timeout_s=600.0)
    salted = RequestScope("s" * 5000)
    assert service.client.lookup("r#0", [1, 2, 3, 4], scope=salted) == 0
    service.client.start("r#1", [1, 2, 3, 4], scope=salted)
    service.client.wait(600.0)
    while service.client.poll("r#1") is None:
        service.client.wait(600.0)
    assert service.client.lookup("r#2", list(range(12))) == 8
    assert "timeout" not in service.client.failures


def test_without_pin_nothing_is_leased(start):
    service = start(8)
    assert service.client.lookup("r#0", list(range(12)), pin=False) == 8
    assert service.targets[0].leases == set()


def test_tokens_and_scope_arrive_as_they_were(start):
    service = start(4)
    scope = RequestScope("salt", "lora", (("a", "b"),), (Extra(2, "hash"),))
    ids = [0, 1, 2**32 - 1, 7]
    for tokens in (ids, np.array(ids, np.uint32), np.array(ids, "<u4").tobytes()):
        service.client.lookup("r#0", tokens, scope=scope)
    assert service.targets[0].seen == [(ids, scope)] * 3


def test_empty_prompt_is_a_miss(start):
    assert start(8).client.lookup("r#0", []) == 0


def test_the_answer_is_the_minimum_over_ranks(start):
    service = start(12, 8, 16)
    assert service.client.lookup("r#0", list(range(16))) == 8
    assert all(target.leases == {"r#0"} for target in service.targets)


def test_a_rank_without_a_hit_ends_the_other_ranks_leases(start):
    service = start(12, 0)
    assert service.client.lookup("r#0", list(range(16))) == 0
    assert [reply.open_leases for reply in service.client.check()] == [0, 0]


def test_hello_names_rank_chunk_size_and_identity(start):
    replies = start(0, 0).client.hello()
    assert [(r.rank, r.world_size, r.chunk_size) for r in replies] == [(0, 2, 4), (1, 2, 4)]
    assert len({r.identity for r in replies}) == 2
    assert all(len(r.identity) == 32 for r in replies)


def test_check_and_clear(start):
    service = start(8, 4)
    report = service.client.check()[0]
    assert (report.used_bytes, report.free_bytes, report.capacity_bytes) == (10, 20, 30)
    assert (report.num_chunks, report.metrics) == (3, {"kvkeep_a_total": 2.0})
    assert service.client.clear() == 12
    assert service.client.lookup("r#0", [1, 2, 3, 4]) == 0


def test_numbers_are_those_of_the_server_and_prove_nothing(start, monkeypatch):
    service = start(8)
    monkeypatch.setattr(type(service.targets[0]), "check", None)  # it is not called
    service.client.lookup("r#0", [1, 2, 3, 4], pin=False)
    [numbers] = service.client.numbers()
    assert numbers["kvkeep_lookup_tokens_total"] == 4


def test_clear_of_some_tiers(start):
    service = start(8, 4)
    assert service.client.clear(["tier"]) == 12
    with pytest.raises(LookupServiceError, match="no tier is called"):
        service.client.clear(["teir"])


def test_lookups_go_on_while_a_slow_tier_is_cleared(start):
    """Also those of the client that gave up waiting for it: its worker is not down."""
    service = start(8, timeout_s=0.2)
    service.targets[0].clear_gate.clear()
    with pytest.raises(LookupServiceError, match="no answer in time"):
        service.client.clear()
    patient = LookupClient(service.paths, timeout_s=30)
    with ThreadPoolExecutor(1) as thread:
        clearing = thread.submit(patient.clear)
        assert service.client.lookup("r#0", [1, 2, 3, 4]) == 4
        assert service.client.failures == {"timeout": 1}
        assert not clearing.done()
        service.targets[0].clear_gate.set()
        assert clearing.result(30) == 0  # the first one has removed everything
    assert service.client.lookup("r#1", [1, 2, 3, 4]) == 0
    patient.close()


def test_a_clear_that_does_not_end_is_the_last_one(start, monkeypatch):
    """Later ones are refused at once, and lookups go on."""
    service = start(8, timeout_s=0.2)
    service.targets[0].clear_gate.clear()
    with pytest.raises(LookupServiceError, match="no answer in time"):
        service.client.clear()
    monkeypatch.setattr(clears, "CLEAR_TIMEOUT_S", 0.0)
    with pytest.raises(LookupServiceError, match="has not ended within 0 s"):
        service.client.clear()
    assert service.client.lookup("r#0", [1, 2, 3, 4]) == 4
    monkeypatch.setattr(clears, "CLEAR_TIMEOUT_S", 120.0)
    monkeypatch.setattr(clears, "MAX_WAITING", 0)
    with pytest.raises(LookupServiceError, match="0 others are waiting"):
        service.client.clear()


def test_a_clear_for_which_there_is_no_thread_is_refused(monkeypatch):
    """It says so, does not run later, and the next one runs."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    jobs, ran = clears.Clears(), []
    with monkeypatch.context() as patch:
        patch.setattr(clears.threading.Thread, "start", refuse)
        assert jobs.start(lambda: ran.append("refused")) == "can't start new thread"
    done = threading.Event()
    assert jobs.start(lambda: (ran.append("next"), done.set())) is None
    assert done.wait(30)
    jobs.close(30)
    assert ran == ["next"]


def test_several_clients_at_once(start):
    """Answers go to who asked, and belong to the question."""
    service = start(1000)

    def ask(number: int) -> bool:
        client = LookupClient(service.paths, timeout_s=30)
        try:
            sizes = [(number * 37 + step * 11) % 90 + 1 for step in range(40)]
            return all(client.lookup(f"{number}#{s}", list(range(s))) == s for s in sizes)
        finally:
            client.close()

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(6)))


def test_one_client_from_several_threads(start):
    service = start(1000)
    with ThreadPoolExecutor(6) as pool:
        sizes = list(range(1, 200))
        found = list(pool.map(lambda s: service.client.lookup(f"#{s}", list(range(s))), sizes))
    assert found == sizes


def test_a_closed_client_misses_and_says_so(start):
    service = start(8)
    service.client.close()
    service.client.close()
    assert service.client.lookup("r#0", [1]) == 0
    service.client.unpin(["r#0"])
    with pytest.raises(LookupServiceError, match="closed"):
        service.client.check()


def test_close_ends_thread_and_socket(start):
    service = start(8)
    server = service.servers[0]
    assert any(thread.name == "kvkeep-lookup" for thread in threading.enumerate())
    server.close()
    server.close()
    assert not service.paths[0].exists()
    assert not any(thread.name == "kvkeep-lookup" for thread in threading.enumerate())


def test_a_path_that_cannot_be_bound_is_an_error(start, tmp_path):
    (tmp_path / "s0").mkdir(mode=0o700)
    (tmp_path / "s0" / "0.sock").mkdir()
    with pytest.raises(LookupServiceError, match="cannot bind"):
        start(1)
    (tmp_path / "s0" / "0.sock").rmdir()


def test_a_client_needs_paths_and_a_deadline(tmp_path):
    with pytest.raises(ValueError, match="deadline"):
        LookupClient([], timeout_s=1)
    with pytest.raises(ValueError, match="deadline"):
        LookupClient([tmp_path / "x"], timeout_s=0)
