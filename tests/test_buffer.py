"""What a user sees of one buffer, in one process and in two."""

import threading
import time

import pytest
import torch

import shmkv
from shmkv import Spec


def kv(n=4, fill=1.0):
    return {"key": torch.full((2, n), fill), "value": torch.arange(n, dtype=torch.int16)}


def test_what_was_inserted_comes_out_once(kv_buffer):
    sequence = kv_buffer.insert([1, 2, 3], kv())
    with kv_buffer.drop_select([1, 2, 3]) as hit:
        assert hit and hit.sequence == sequence
        assert (hit.matched_tokens, hit.n_tokens, hit.nbytes, hit.transport) == (3, 3, 40, "host")
        assert list(hit) == ["key", "value"] and torch.equal(hit["key"], kv()["key"])
    with kv_buffer.drop_select([1, 2, 3]) as miss:
        assert not miss and "no such entry" in miss.reason
    assert kv_buffer.stats().used_bytes == 0


def test_select_shares_and_leaves_the_entry(kv_buffer):
    kv_buffer.insert([1, 2, 3], kv())
    first, second = kv_buffer.select([1, 2, 3]), kv_buffer.select([1, 2, 3])
    first["key"].zero_()
    assert torch.equal(second["key"], kv()["key"]), "one reader's write reached another"
    first.release(), second.release()
    assert kv_buffer.drop_select([1, 2, 3])


@pytest.mark.parametrize("match, tokens, expected", [
    ("exact", [1, 2, 3], 3), ("exact", [1, 2, 3, 4], None), ("exact", [1, 2], None),
    ("prefix", [1, 2, 3, 4, 5, 6], 5), ("prefix", [1, 2, 3, 9], 3), ("prefix", [1, 2], 1), ("prefix", [2], None),
    ("overlap", [1, 2, 3, 4, 9], 4), ("overlap", [1, 2], 2), ("overlap", [9], None),
])
def test_matching(kv_buffer, match, tokens, expected):
    for length in (1, 3, 5):
        kv_buffer.insert([1, 2, 3, 4, 5][:length], kv())
    hit = kv_buffer.select(tokens, match=match)
    assert (hit.matched_tokens if hit else None) == expected


def test_min_tokens_refuses_a_shorter_match(kv_buffer):
    kv_buffer.insert([1, 2, 3], kv())
    assert not kv_buffer.select([1, 2, 3, 4], min_tokens=4)
    assert kv_buffer.select([1, 2, 3, 4], min_tokens=3)


def test_namespaces_never_meet(kv_buffer):
    kv_buffer.insert([1, 2, 3], kv(), namespace={"model": "a", "rank": 0})
    for other in (None, {"model": "a"}, {"model": "a", "rank": 1}, {"model": "a", "rank": False}):
        assert not kv_buffer.select([1, 2, 3], namespace=other, match="overlap")
    hit = kv_buffer.select([1, 2, 3], namespace={"rank": 0, "model": "a"})
    assert hit.namespace == {"model": "a", "rank": 0}


def test_equal_keys_come_out_oldest_first(kv_buffer):
    sequences = [kv_buffer.insert([7, 8], kv(fill=float(i))) for i in range(4)]
    taken = [kv_buffer.drop_select([7, 8], copy=True) for _ in range(4)]
    assert [hit.sequence for hit in taken] == sequences
    assert [hit["key"][0, 0].item() for hit in taken] == [0.0, 1.0, 2.0, 3.0]


def test_roi_is_the_key_and_travels_with_the_entry(kv_buffer):
    kv_buffer.insert([5, 6, 7, 8], kv(), roi=[True, False, True, True])
    hit = kv_buffer.drop_select([5, 7, 8, 9])
    assert hit.matched_tokens == 3
    assert hit.tokens.tolist() == [5, 6, 7, 8] and hit.roi.tolist() == [True, False, True, True]


def test_reserve_seals_on_exit_and_aborts_on_an_exception(kv_buffer):
    with kv_buffer.reserve([1], {"x": Spec((3,), torch.bfloat16)}) as entry:
        assert not kv_buffer.select([1]), "an entry was visible before it was sealed"
        entry["x"].fill_(2)
    assert kv_buffer.drop_select([1], copy=True)["x"].tolist() == [2, 2, 2]
    with pytest.raises(ZeroDivisionError), kv_buffer.reserve([1], {"x": Spec((3,), torch.bfloat16)}):
        1 / 0  # noqa: B018
    assert not kv_buffer.select([1])
    assert kv_buffer.stats().entries["free"] == 256


def test_a_reserved_tensor_that_outlives_an_abort_pins_its_bytes(kv_buffer):
    entry = kv_buffer.reserve([1], {"x": Spec((1024,), torch.float32)})
    kept = entry["x"]
    entry.abort()
    assert kv_buffer.stats().entries["dropped"] == 1
    kept.fill_(1)
    del kept, entry
    assert kv_buffer.stats().used_bytes == 0


def test_a_producers_tensor_that_outlives_the_seal_pins_the_bytes_only(kv_buffer):
    entry = kv_buffer.reserve([1], {"x": Spec((1024,), torch.float32)})
    kept = entry["x"]
    entry.seal()
    assert kv_buffer.drop_select([1], copy=True)
    assert kv_buffer.stats().entries["dropped"] == 1
    del kept
    assert kv_buffer.stats().used_bytes == 0


def test_what_can_never_fit_is_refused_at_once_with_both_sizes(kv_create):
    buffer = kv_create(capacity=1 << 20)
    with pytest.raises(shmkv.TooLarge, match="1052672 B, the arena has 1048576 B"):
        buffer.insert([1], {"x": torch.zeros((1 << 20) + 1, dtype=torch.uint8)}, timeout=None)
    buffer.insert([1], {"x": torch.zeros(1 << 20, dtype=torch.uint8)})
    with pytest.raises(shmkv.TooLarge, match="meta"):
        kv_create(meta_capacity=4096).insert(range(2000), {"x": torch.zeros(1)}, timeout=None)


def test_a_full_buffer_says_so_and_changes_nothing(kv_create):
    buffer = kv_create(capacity=8192)
    buffer.insert([1], {"x": torch.zeros(4096, dtype=torch.uint8)})
    buffer.insert([2], {"x": torch.zeros(4096, dtype=torch.uint8)})
    with pytest.raises(shmkv.ArenaFull, match="need 4096 B, 0 B are free, 0 B of them in one piece"):
        buffer.insert([3], kv(), on_full="error")
    with pytest.raises(shmkv.ArenaFull):
        buffer.insert([3], kv(), timeout=0)
    started = time.monotonic()
    with pytest.raises(shmkv.TimedOut, match="no room: .*, 0.2 s after the call"):
        buffer.insert([3], kv(), timeout=0.2)
    assert 0.2 <= time.monotonic() - started < 2
    assert buffer.select([1]) and buffer.select([2]) and not buffer.select([3])


def test_fragmented_room_names_the_largest_run(kv_create):
    buffer = kv_create(capacity=4 * 4096)
    for token in range(4):
        buffer.insert([token], {"x": torch.zeros(4096, dtype=torch.uint8)})
    buffer.drop_select([0]).release(), buffer.drop_select([2]).release()
    with pytest.raises(shmkv.ArenaFull, match="need 8192 B, 8192 B are free, 4096 B of them in one piece"):
        buffer.insert([9], {"x": torch.zeros(8192, dtype=torch.uint8)}, on_full="error")


def test_evict_frees_the_least_recently_used_that_nobody_holds(kv_create):
    buffer = kv_create(capacity=3 * 4096)
    for token in range(3):
        buffer.insert([token], {"x": torch.zeros(4096, dtype=torch.uint8)})
    held = buffer.select([0])
    buffer.select([1]).release()
    buffer.insert([7], {"x": torch.zeros(4096, dtype=torch.uint8)}, on_full="evict")
    assert [bool(buffer.select([token])) for token in (0, 1, 2, 7)] == [True, True, False, True]
    held.release()


def test_a_waiting_insert_goes_on_when_room_is_made(kv_create):
    buffer = kv_create(capacity=4096)
    buffer.insert([1], kv())
    hit = buffer.drop_select([1])
    done = threading.Thread(target=lambda: buffer.insert([2], kv(), timeout=20))
    done.start()
    while not buffer.stats().waiting["room"]:
        pass
    hit.release()
    done.join(20)
    assert buffer.select([2])


def test_ttl_frees_an_entry_that_nobody_holds(kv_buffer):
    kv_buffer.insert([1], kv(), ttl=0.15)
    held = kv_buffer.select([1])
    assert not kv_buffer.drop_select([2], timeout=0.3)
    assert kv_buffer.select([1]), "TTL ran while the entry was held"
    held.release()
    del held
    assert not kv_buffer.drop_select([2], timeout=0.3)
    assert not kv_buffer.select([1])
    assert kv_buffer.stats().counters["expired"] == 1 and kv_buffer.stats().used_bytes == 0


def test_cancel_drops_ready_entries_and_those_being_written(kv_buffer):
    kv_buffer.insert([1, 2], kv())
    kv_buffer.insert([1, 2], kv())
    kv_buffer.insert([1, 2, 3], kv())
    entry = kv_buffer.reserve([1, 2], {"x": Spec((1,), torch.int8)})
    assert kv_buffer.cancel([1, 2]) == 3
    with pytest.raises(shmkv.Cancelled):
        entry.seal()
    assert not kv_buffer.select([1, 2]) and kv_buffer.select([1, 2, 3])
    assert kv_buffer.cancel([9]) == 0


def test_a_returned_entry_is_delivered_again_in_its_old_place(kv_buffer):
    kv_buffer.insert([1], kv(fill=1.0))
    kv_buffer.insert([1], kv(fill=2.0))
    hit = kv_buffer.drop_select([1])
    hit["key"].zero_()
    hit.release(returned=True)
    del hit
    again = kv_buffer.drop_select([1], copy=True)
    assert again["key"].unique().tolist() == [1.0]


def test_a_producer_learns_what_became_of_its_entry(kv_buffer):
    sequence = kv_buffer.insert([1], kv())
    with shmkv.attach(kv_buffer.name) as other:
        other.drop_select([1]).release()
        other.stats()
    news = [(signal.kind.name, signal.sequence) for signal in kv_buffer.signals(timeout=5)]
    assert news == [("TAKEN", sequence), ("RELEASED", sequence), ("CLOSED", 0)]


def test_wrong_arguments_are_named(kv_buffer):
    with pytest.raises(shmkv.InvalidArgument, match="match='best'"):
        kv_buffer.select([1], match="best")
    with pytest.raises(shmkv.InvalidArgument, match="on_full='drop'"):
        kv_buffer.insert([1], kv(), on_full="drop")
    with pytest.raises(shmkv.InvalidArgument, match="ttl=-1"):
        kv_buffer.insert([1], kv(), ttl=-1)
    with pytest.raises(shmkv.InvalidArgument, match="timeout=-1"):
        kv_buffer.select([1], timeout=-1)
    with pytest.raises(shmkv.InvalidArgument, match="min_tokens=0"):
        kv_buffer.select([1], min_tokens=0)
    with pytest.raises(shmkv.InvalidTokens):
        kv_buffer.insert([], kv())
    with pytest.raises(shmkv.InvalidTensor):
        kv_buffer.insert([1], {"x": [1, 2]})
    with pytest.raises(shmkv.InvalidArgument, match="lots"):
        shmkv.create(capacity="lots")
    assert kv_buffer.stats().entries["free"] == 256


def test_copy_to_refuses_before_a_byte_moves(kv_buffer):
    kv_buffer.insert([1], kv())
    with kv_buffer.select([1]) as hit:
        target = {"key": torch.zeros(2, 4), "value": torch.zeros(4)}
        with pytest.raises(shmkv.InvalidTensor, match="'value' is torch.int16"):
            hit.copy_to(target)
        assert not target["key"].any()
        hit.copy_to({"key": target["key"]})
        assert target["key"].all()


def test_a_closed_handle_and_a_released_hit_say_so(kv_buffer):
    kv_buffer.insert([1], kv())
    hit = kv_buffer.select([1])
    hit.release()
    with pytest.raises(shmkv.ClosedError):
        hit["key"]
    other = shmkv.attach(kv_buffer.name)
    other.close()
    other.close()
    for call in (lambda: other.insert([1], kv()), lambda: other.select([1]), other.stats, other.signals):
        with pytest.raises(shmkv.ClosedError):
            call()


def take(name, tokens, timeout):
    with shmkv.attach(name) as buffer, buffer.drop_select(tokens, timeout=timeout) as hit:
        return hit["key"].tolist() if hit else hit.reason


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_another_process_takes_the_entry(kv_buffer, kv_spawn, method):
    child = kv_spawn(take, kv_buffer.name, [1, 2, 3, 4], 30, method=method)
    kv_buffer.insert([1, 2, 3], {"key": torch.tensor([1.5, -2.0])})
    assert child.result() == [1.5, -2.0]
    assert kv_buffer.stats().entries["free"] == 256
