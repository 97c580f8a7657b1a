"""The NVMe tier with real files: what goes in comes back, in order of urgency, within bounds."""

import logging
import queue
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.tiers.blockio import RUN_BLOCKS_MAX, plan
from kvtierd.tiers.bodies import W_FLAGS, W_PLACE
from kvtierd.tiers.pool import Priority, WorkPool
from kvtierd.tiers.spill import JOBS_MAX
from kvtierd.tiers.spill_files import FILE_SHIFT
from kvtierd.tiers.spill_io import ClearJob, JobResult, QueueFull, Status, WriteJob
from kvtierd.tiers.superblock import Kind
from tests.spill_support import (
    BLOCK_BYTES,
    KIB,
    WAIT_S,
    CountingKernel,
    GateKernel,
    Rig,
    settings,
)

# ------------------------------------------------------------ what goes in comes back


@pytest.mark.parametrize("direct_io", ["try", "off"])
@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("length", [BLOCK_BYTES, BLOCK_BYTES - 1000, 1])
def test_blocks_come_back_as_they_were(
    tmp_path: Path, direct_io: str, durability: str, length: int
) -> None:
    wanted = settings(tmp_path / "a", direct_io=direct_io, durability=durability)
    with Rig(wanted) as rig:
        slots = rig.assign(0)
        written = rig.write(slots, length)
        before = rig.in_arena(written)
        read = rig.read(slots, written.checksums, length)
        assert written.ok and read.ok
        assert np.array_equal(rig.in_arena(read), before)


def test_scattered_slots_of_several_files_come_back_each_to_its_place(tmp_path: Path) -> None:
    with Rig(settings(tmp_path / "a", tmp_path / "b")) as rig:
        slots = np.concatenate([rig.assign(slab) for slab in (0, 3, 4, 6)])
        slots = np.random.default_rng(1).permutation(slots)[:100]
        written = rig.write(slots)
        before = rig.in_arena(written)
        backwards = slots[::-1].copy()
        read = rig.read(backwards, written.checksums[::-1].copy())
        assert written.ok and read.ok
        assert np.array_equal(rig.in_arena(read), before[::-1])


def test_a_restart_finds_the_blocks_and_what_to_verify_them_by(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "a", tmp_path / "b")
    with Rig(wanted) as rig:
        slots = np.concatenate([rig.assign(1)[:20], rig.assign(5)[:20]])
        written = rig.write(slots)
        before = rig.in_arena(written)
    with Rig(wanted, generation=1) as again:
        assert [entry.slab for entry in again.files.slabs()] == [1, 5]
        assert np.array_equal(again.found(), slots)
        assert np.array_equal(again.sums_found(), written.checksums)
        assert len(again.lost()) == 0 and again.files.warnings == []
        read = again.read(slots, again.sums_found())
        assert read.ok and np.array_equal(again.in_arena(read), before)


def test_a_block_says_on_the_medium_where_it_lies_and_how_it_was_summed(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "a", tmp_path / "b")
    with Rig(wanted) as rig:
        slots = rig.assign(4)[:3]
        job = rig.write_job(slots)
        untouched = job.bodies.copy()
        assert rig.run(job).ok
        assert np.array_equal(job.bodies, untouched)
    with Rig(wanted, generation=1) as again:
        (part,) = (part for part in again.scans if len(part.found.slots))
        local = slots - again.files.geometry.total_slots
        assert part.found.bodies[:, W_PLACE].tolist() == [Kind.SPILL << 56 | int(s) for s in local]
        assert (part.found.bodies[:, W_FLAGS] >> np.uint64(48) & np.uint64(0xFF) == 1).all()


def test_a_cleared_block_does_not_come_back(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "a")
    with Rig(wanted) as rig:
        slots = rig.assign(0)
        rig.write(slots)
        assert rig.clear(slots[::2]).ok
    with Rig(wanted, generation=1) as again:
        assert np.array_equal(again.found(), slots[1::2])


def test_a_slab_changes_hands_without_old_blocks_coming_alive(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "a")
    with Rig(wanted) as rig:
        old = rig.assign(0)
        rig.write(old)
        rig.clear(old)
        rig.tier.free_slab(0)
        new = rig.assign(0, slot_bytes=2 * BLOCK_BYTES)[:5]
        written = rig.write(new, 2 * BLOCK_BYTES)
        assert rig.read(new, written.checksums, 2 * BLOCK_BYTES).ok
    with Rig(wanted, generation=1) as again:
        assert [entry.slot_bytes for entry in again.files.slabs()] == [2 * BLOCK_BYTES]
        assert np.array_equal(again.found(), new)


def test_a_slab_taken_back_is_free_after_a_restart(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "a")
    with Rig(wanted) as rig:
        slots = rig.assign(2)
        rig.write(slots)
        rig.clear(slots)
        rig.tier.free_slab(2)
    with Rig(wanted, generation=1) as again:
        assert again.files.slabs() == []


def test_a_damaged_directory_entry_is_reported_and_its_blocks_stay_dead(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "a")
    with Rig(wanted) as rig:
        rig.write(rig.assign(0))
        offset = rig.files.geometry.directory_offset
    with open(tmp_path / "a" / "headers.kv", "r+b") as headers:
        headers.seek(offset)
        headers.write(b"?")
    with Rig(wanted, generation=1) as again:
        assert again.files.damaged_slabs == [0]
        assert "damaged" in again.files.warnings[0]
        assert len(again.found()) == 0
        new = again.assign(0)[:1]
        again.write(new)
    with Rig(wanted, generation=2) as third:
        assert np.array_equal(third.found(), new)


# ------------------------------------------------------------ how it is cut


@given(
    slots=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4000)), max_size=300, unique=True),
    pages=st.integers(1, 3),
    task_bytes=st.integers(0, 200 * KIB),
)
def test_a_plan_has_every_block_once_in_runs_without_gaps(
    slots: list[tuple[int, int]], pages: int, task_bytes: int
) -> None:
    size = pages * 4096
    places = np.array([(file << FILE_SHIFT) + place * size for file, place in slots], np.int64)
    cut = plan(places, size, task_bytes)
    ordered = places if cut.order is None else places[cut.order]
    assert sorted(ordered.tolist()) == sorted(places.tolist())
    ends = [0]
    for task in cut.tasks:
        assert sum(last - first for first, last in task) <= max(task_bytes // size, 1)
        for first, last in task:
            assert first == ends[-1] and last - first <= RUN_BLOCKS_MAX
            assert (np.diff(ordered[first:last]) == size).all()
            ends.append(last)
    assert ends[-1] == len(places)
    assert len(cut.tasks) == -(-len(places) // max(task_bytes // size, 1))


def test_neighbouring_blocks_share_a_system_call(tmp_path: Path) -> None:
    kernel = CountingKernel()
    with Rig(settings(tmp_path / "a"), kernel=kernel) as rig:
        slots = rig.assign(0)
        kernel.writes.clear()
        kernel.reads.clear()
        written = rig.write(slots)
        rig.read(slots, written.checksums)
    assert sum(kernel.writes) == sum(kernel.reads) == len(slots) == 64
    assert len(kernel.writes) <= 4 + 1 and len(kernel.reads) <= 4 + 1  # one per thread


def test_a_job_without_blocks_has_a_result(tmp_path: Path) -> None:
    none = np.zeros(0, np.int64)
    with Rig(settings(tmp_path / "a")) as rig:
        assert rig.write(none).ok
        assert rig.read(none, np.zeros(0, np.uint64)).ok
        assert rig.clear(none).ok
        assert rig.tier.counters().jobs_in_flight == 0


# ------------------------------------------------------------ bounds, order, cancelling


def test_the_queue_is_bounded_and_leaves_room_for_urgent_work(tmp_path: Path) -> None:
    kernel = GateKernel()
    with Rig(settings(tmp_path / "a", queue_bytes=64 * BLOCK_BYTES), kernel=kernel) as rig:
        slots = rig.assign(0)
        urgency = list(Priority)
        quarter = 16 * BLOCK_BYTES
        assert [rig.tier.room_bytes(p) // quarter for p in urgency] == [4, 3, 2, 1]
        held = rig.start(rig.write_job(slots[:33]))
        assert [rig.tier.room_bytes(p) // BLOCK_BYTES for p in urgency] == [31, 15, 0, 0]
        with pytest.raises(QueueFull):
            rig.start(rig.write_job(slots[33:50], priority=Priority.DEMAND_WRITE))
        with pytest.raises(QueueFull):
            rig.start(rig.write_job(slots[33:34], priority=Priority.BACKGROUND))
        kernel.gate.set()
        assert held.get(timeout=WAIT_S).ok
        assert rig.tier.counters().in_flight_bytes == 0


def test_a_job_larger_than_the_queue_is_taken_alone(tmp_path: Path) -> None:
    kernel = GateKernel()
    with Rig(settings(tmp_path / "a", queue_bytes=BLOCK_BYTES), kernel=kernel) as rig:
        slots = rig.assign(0)
        large = rig.start(rig.write_job(slots[:8]))
        with pytest.raises(QueueFull):
            rig.start(rig.write_job(slots[8:9]))
        kernel.gate.set()
        assert large.get(timeout=WAIT_S).ok


def test_the_number_of_jobs_is_bounded(tmp_path: Path) -> None:
    kernel = GateKernel()
    with Rig(settings(tmp_path / "a", io_threads=1), kernel=kernel) as rig:
        slots = rig.assign(0)
        rig.start(rig.write_job(slots[:1]))
        clears = [rig.start(ClearJob(slots[1:2])) for _ in range(JOBS_MAX - 1)]
        assert rig.tier.room_bytes(Priority.DEMAND_READ) == 0
        with pytest.raises(QueueFull):
            rig.start(ClearJob(slots[1:2]))
        kernel.gate.set()
        assert all(clear.get(timeout=WAIT_S).ok for clear in clears)


def test_urgent_work_overtakes_what_is_queued(tmp_path: Path) -> None:
    kernel = GateKernel()
    order: queue.Queue[Priority] = queue.Queue()

    def note(result: JobResult) -> None:
        order.put(result.job.priority)

    with Rig(settings(tmp_path / "a", io_threads=1), kernel=kernel) as rig:
        slots = rig.assign(0)
        first = rig.start(rig.write_job(slots[:1]))
        assert kernel.entered.acquire(timeout=WAIT_S)
        for place, priority in enumerate(reversed(Priority), start=1):
            rig.tier.submit(rig.write_job(slots[place : place + 1], priority=priority), note)
        kernel.gate.set()
        assert first.get(timeout=WAIT_S).ok
        assert [order.get(timeout=WAIT_S) for _ in Priority] == list(Priority)


def test_a_cancelled_job_ends_without_touching_the_medium(tmp_path: Path) -> None:
    kernel = GateKernel()
    wanted = settings(tmp_path / "a", io_threads=1)
    results: queue.Queue[JobResult] = queue.Queue()
    with Rig(wanted, kernel=kernel) as rig:
        slots = rig.assign(0)
        first = rig.start(rig.write_job(slots[:1]))
        assert kernel.entered.acquire(timeout=WAIT_S)
        ticket = rig.tier.submit(rig.write_job(slots[1:5]), results.put)
        ticket.cancel()
        kernel.gate.set()
        assert first.get(timeout=WAIT_S).ok
        assert results.get(timeout=WAIT_S).status.tolist() == [Status.CANCELLED] * 4
        counters = rig.tier.counters()
        assert (counters.cancelled_blocks, counters.written_blocks) == (4, 1)
        assert (counters.in_flight_bytes, counters.jobs_in_flight) == (0, 0)
    with Rig(wanted, generation=1) as again:
        assert np.array_equal(again.found(), slots[:1])


def test_cancelling_does_not_tear_what_was_begun(tmp_path: Path) -> None:
    kernel = GateKernel()
    results: queue.Queue[JobResult] = queue.Queue()
    wanted = settings(tmp_path / "a", io_threads=1)
    with Rig(wanted, kernel=kernel) as rig:
        slots = rig.assign(0)
        ticket = rig.tier.submit(rig.write_job(slots[:4]), results.put)
        assert kernel.entered.acquire(timeout=WAIT_S)
        ticket.cancel()
        kernel.gate.set()
        assert results.get(timeout=WAIT_S).ok
    with Rig(wanted, generation=1) as again:
        assert again.read(again.found(), again.sums_found()).ok
        assert np.array_equal(again.found(), slots[:4])


def test_closing_finishes_what_was_submitted(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "a", io_threads=2)
    rig = Rig(wanted)
    slots = rig.assign(0)
    results = [rig.start(rig.write_job(slots[i : i + 4])) for i in range(0, 64, 4)]
    assert rig.tier.close(WAIT_S)
    assert all(result.get_nowait().ok for result in results)
    with Rig(wanted, generation=1) as again:
        assert np.array_equal(again.found(), slots)


def test_closing_gives_up_on_a_disk_that_hangs_and_cancels_the_rest(tmp_path: Path) -> None:
    kernel = GateKernel()
    rig = Rig(settings(tmp_path / "a", io_threads=1), kernel=kernel)
    slots = rig.assign(0)
    hung = rig.start(rig.write_job(slots[:1]))
    queued = rig.start(rig.write_job(slots[1:3]))
    assert kernel.entered.acquire(timeout=WAIT_S)
    assert not rig.tier.close(0.01)
    kernel.gate.set()
    assert hung.get(timeout=WAIT_S).ok
    assert queued.get(timeout=WAIT_S).status.tolist() == [Status.CANCELLED] * 2
    assert rig.tier.close(WAIT_S)


def test_counters_say_what_was_done(tmp_path: Path) -> None:
    with Rig(settings(tmp_path / "a")) as rig:
        slots = rig.assign(0)[:10]
        written = rig.write(slots, BLOCK_BYTES - 1000)
        wrong = written.checksums.copy()
        wrong[:3] += np.uint64(1)
        rig.read(slots, wrong, BLOCK_BYTES - 1000)
        rig.clear(slots[:2])
        counters = rig.tier.counters()
        size = BLOCK_BYTES - 1000
        assert (counters.written_blocks, counters.written_bytes) == (10, 10 * size)
        assert (counters.read_blocks, counters.read_bytes) == (7, 7 * size)
        assert (counters.mismatched_blocks, counters.cleared_blocks) == (3, 2)
        assert counters.busy_s > 0


def test_a_task_that_raises_does_not_take_its_thread_along(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise SystemExit("not even this")

    pool = WorkPool(1, "test")
    reached = threading.Event()
    with caplog.at_level(logging.CRITICAL):
        pool.put(Priority.BACKGROUND, (1, 1), 1.0, [fail] * 10)
        pool.put(Priority.BACKGROUND, (1, 1), 1.0, [reached.set])
        assert reached.wait(WAIT_S)
    assert pool.crashes == 10
    assert pool.close(WAIT_S)


def test_a_result_nobody_can_take_is_no_reason_to_stop(tmp_path: Path) -> None:
    def refuse(_: JobResult) -> None:
        raise RuntimeError("the loop is closed")

    with Rig(settings(tmp_path / "a", io_threads=1)) as rig:
        slots = rig.assign(0)
        rig.tier.submit(rig.write_job(slots[:1]), refuse)
        assert rig.write(slots[1:2]).ok
        counters = rig.tier.counters()
        assert (counters.crashes, counters.in_flight_bytes, counters.written_blocks) == (1, 0, 2)


def test_blocks_that_do_not_fit_are_a_programmers_error(tmp_path: Path) -> None:
    with Rig(settings(tmp_path / "a")) as rig:
        slots = rig.assign(0)[:1]
        job = rig.write_job(slots)
        outside = WriteJob(
            slots, job.arena[: BLOCK_BYTES // 2], job.offsets, BLOCK_BYTES, job.bodies, job.words
        )
        with pytest.raises(AssertionError, match="arena"):
            rig.start(outside)
        with pytest.raises(AssertionError, match="slab"):
            rig.start(rig.write_job(slots, 2 * BLOCK_BYTES))
        with pytest.raises(AssertionError, match="slab"):
            rig.start(rig.write_job(slots + rig.files.geometry.max_slots))
