"""Fills steps: decodes first, then prompts in chunks, up to a budget of estimated compute.

One readable pass per step (`plan`), and its counterpart when the step has run (`settle`). The scheduler
owns slots and leases. It knows blocks and lengths; it knows nothing of tensors, text or clocks.
"""

from __future__ import annotations

from ...cache import BlockCopy, KVStore, Lease, Match
from ...cache.mover import Mover
from ...kernels.batch import SlotTables, StepOutput
from ..request import Sequence, Settled, Status
from .cost import CostModel
from .plan import Segment, StepBuilder, StepPlan
from .queue import WaitingQueue

MIN_CHUNK = 16  # rows a prompt gets even beside decodes that fill the budget: no starvation
ADMISSION_SCAN = (
    16  # waiting sequences looked at when the first cannot start (it waits for its twin's prompt)
)
IDLE_BUDGET_FACTOR = 2.0  # with nothing decoding, nobody waits for the next token


class Scheduler:
    """Continuous batching over the slots of one executor."""

    def __init__(
        self,
        store: KVStore,
        tables: SlotTables,
        cost: CostModel,
        *,
        step_budget_ms: float,
        max_rows: int,
        max_logits_rows: int,
    ) -> None:
        self.store = store
        self.cost = cost
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """Sequences with a slot, in `order`; finished and preempted ones stay until they leave it."""
        self.preemptions = 0
        self.mover: Mover | None = None
        """What brings blocks up from and down to the tiers below the device, once the engine has started."""
        self._tables = tables
        self._budget_ms = step_budget_ms
        self._max_rows = max_rows
        self._max_logits_rows = max_logits_rows
        self._free_slots = list(range(tables.slots - 1, -1, -1))
        self._steps = 0
        self._copies_in_flight: list[BlockCopy] = []

    # -- from the engine ---------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        self._look_below(seq)
        self.waiting.push(seq)

    def finish(self, seq: Sequence) -> None:
        """End a sequence, wherever it is. Its blocks are released once no step in flight names it;
        idempotent."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            seq.status = Status.FINISHED
            self._end_load(seq)
            return
        seq.status = Status.FINISHED
        self._leave_if_idle(seq)

    def has_work(self) -> bool:
        return bool(self.waiting) or any(seq.status is not Status.FINISHED for seq in self.running)

    # -- planning ----------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Plan the next step, or None if nothing can run now. What is planned counts as computed at once:
        the caller must launch it."""
        decoding = [s for s in self.running if s.status is Status.RUNNING and not s.is_prefilling]
        factor = 1.0 if decoding else IDLE_BUDGET_FACTOR
        step = StepBuilder(factor * self._budget_ms, self._max_rows, self._max_logits_rows)
        step.spent_ms = self.cost.step_overhead_ms()
        for seq in decoding:
            if seq.status is Status.RUNNING and seq.waits_for_rows and seq.can_sample:
                self._decode(seq, step)
        for seq in [s for s in self.running if s.status is Status.RUNNING and s.is_prefilling]:
            if seq.status is Status.RUNNING and not self._prefill(seq, step):
                break
        else:
            self._admit(step)
        if not step.segments:
            return None
        self._steps += 1
        self._copies_in_flight += step.copies
        return step.build(self._steps)

    def _decode(self, seq: Sequence, step: StepBuilder) -> None:
        if step.rows < step.max_rows and step.logits_rows < step.max_logits_rows:
            if self._grow(seq, seq.computed + 1, step):
                self._take_rows(seq, 1, step)

    def _prefill(self, seq: Sequence, step: StepBuilder) -> bool:
        """Give a prompt its next chunk; False if the step has no room for prompts any more."""
        most = min(seq.waits_for_rows, step.max_rows - step.rows)
        if seq.is_scoring:
            most = min(most, step.max_logits_rows - step.logits_rows)
        if most <= 0 or step.logits_rows >= step.max_logits_rows:
            return False
        rows = self.cost.rows_within(step.remaining_ms, seq.computed, most)
        if not step.chunks:
            rows = max(rows, min(MIN_CHUNK, most))
        if rows <= 0:
            return False
        if self._grow(seq, seq.computed + rows, step):
            self._take_rows(seq, rows, step)
            step.chunks += 1
        return rows == most

    def _take_rows(self, seq: Sequence, rows: int, step: StepBuilder) -> None:
        start, end = seq.computed, seq.computed + rows
        sample = end == seq.length and seq.can_sample
        logits = int(sample)
        if seq.pooled is not None:
            wanted = end - max(start, seq.scoring) if seq.is_scoring else int(end == seq.prompt_len)
            logits, seq.scoring = max(wanted, 0), max(end, seq.scoring)
        elif seq.is_scoring:
            first = max(start, seq.scoring - 1)  # row p scores token p + 1
            logits = max(logits, end - first)
            seq.scoring = min(end + 1, seq.prompt_len)
        step.add(Segment(seq, start, rows, logits, sample), self.cost.chunk_ms(start, rows, logits))
        seq.computed = end
        seq.pending += sample
        seq.in_flight += 1

    def _grow(self, seq: Sequence, tokens: int, step: StepBuilder) -> bool:
        """Make room for `tokens` tokens, preempting later sequences if there is no other way."""
        assert seq.lease is not None
        blocks = -(-tokens // self.store.block_tokens)
        before = len(seq.lease.blocks[0])
        if blocks <= before:
            return True
        while not self.store.reserve(seq.lease, blocks):
            if self.mover is not None and self.mover.loader.yield_holds():
                continue
            if any(s.status is not Status.RUNNING for s in self.running):
                return False  # blocks are on their way back; try again at the next step
            victim = next((s for s in reversed(self.running) if not step.names(s)), seq)
            self._preempt(victim)
            if victim is seq or victim.in_flight:
                return False
        self._write_blocks(seq, before)
        return True

    def _preempt(self, seq: Sequence) -> None:
        seq.status = Status.PREEMPTED
        seq.preemptions += 1
        self.preemptions += 1
        self._leave_if_idle(seq)

    # -- admission ---------------------------------------------------------------------------------

    def _admit(self, step: StepBuilder) -> None:
        scanned = 0
        for seq in list(self.waiting):
            full = step.rows >= step.max_rows or step.logits_rows >= step.max_logits_rows
            if not self._free_slots or full or (step.chunks and step.remaining_ms <= 0.0):
                return
            if seq.load is not None and seq.load.done and seq.load.yielded:
                if scanned:
                    return  # what it could load found no room: it is loaded when all before it have started
                self._look_below(seq, is_next=True)
            if seq.load is not None and not seq.load.done:
                if self.mover is not None and not self.mover.loader.start_waiting(seq.load):
                    return  # its blocks find no room yet: nobody overtakes it
                continue
            scanned += 1
            if scanned > ADMISSION_SCAN:
                return
            looks = seq.cache.read and not seq.scores_prompt
            match = self.store.lookup(seq.prompt, seq.tokens) if looks else None
            if self._waits_for_other(seq, match):
                continue
            leased = self._lease(seq, match)
            if leased is None:
                return
            lease, copies = leased
            if not self._has_room(seq, lease) and not self._takes_room(seq, lease):
                self.store.drop_copies(copies)
                self.store.release(lease)
                return
            self._start(seq, lease, match)
            more = self._prefill(seq, step)
            if seq.in_flight:
                step.copies += copies
            else:
                self.store.drop_copies(copies)
                self._withdraw(seq)
            if not more:
                return

    def _waits_for_other(self, seq: Sequence, match: Match | None) -> bool:
        """Whether another sequence is about to compute what this one needs: sharing beats computing."""
        parent = seq.parent
        if parent is not None and not parent.preemptions:
            if parent.status is not Status.FINISHED and parent.settled < parent.prompt_len:
                return True
        if match is None or len(match.nodes) >= len(seq.prompt.keys):
            return False
        depth, key = len(match.nodes), seq.prompt.keys[len(match.nodes)]
        return any(
            other.status is Status.RUNNING
            and other.cache.write
            and other.settled < other.prompt_len
            and depth < len(other.prompt.keys)
            and other.prompt.keys[depth] == key
            for other in self.running
        )

    def _lease(self, seq: Sequence, match: Match | None) -> tuple[Lease, list[BlockCopy]] | None:
        """Take the blocks that can be reused: from the choice it forks from, or from the prefix tree."""
        parent = seq.parent
        if parent is not None and parent.lease is not None and parent.settled >= seq.prompt_len:
            forked = self.store.fork(parent.lease, seq.prompt_len - 1)
            if forked is not None:
                return forked
        return self.store.acquire(match or self.store.nothing(seq.prompt))

    def _has_room(self, seq: Sequence, lease: Lease) -> bool:
        """Whether the whole prompt fits beside what running prompts still need and a block of growth for
        each of them. One sequence alone always fits: longer prompts are refused at the door."""
        wanted = self._blocks(len(seq.tokens) + 1) - len(lease.blocks[0])
        return not self.running or wanted <= self.store.pools[0].available - self.reserved_blocks()

    def reserved_blocks(self) -> int:
        """Blocks that running sequences still need for their prompts, and one of growth for each."""
        promised = sum(
            max(0, self._blocks(s.prompt_len) - len(s.lease.blocks[0]))
            for s in self.running
            if s.lease is not None and s.status is Status.RUNNING
        )
        return promised + len(self.running)

    def _start(self, seq: Sequence, lease: Lease, match: Match | None) -> None:
        """Give a waiting sequence a slot and fill the slot's tables."""
        self.waiting.remove(seq)
        seq.lease, seq.status, seq.slot = lease, Status.RUNNING, self._free_slots.pop()
        seq.computed = seq.settled = lease.tokens
        if not seq.admitted:
            seq.cached, seq.admitted = lease.tokens, True
            self._note_reuse(seq, match)
        if self.mover is not None and match is not None and seq.cache.durable:
            self.mover.touch(match.last, seq.cache.ttl_s)
        self._end_load(seq)
        index = len(self.running)
        while index and self.running[index - 1].order > seq.order:
            index -= 1
        self.running.insert(index, seq)
        self._tables.tokens[seq.slot, : len(seq.tokens)] = seq.tokens
        self._tables.set_sampling(seq.slot, seq.sampling)
        for table in self._tables.block_tables:
            table[seq.slot] = -1
        self._write_blocks(seq, 0)

    def _note_reuse(self, seq: Sequence, match: Match | None) -> None:
        """Keep what a request is told about its prompt's blocks: where they were, and why not more."""
        load, block_tokens = seq.load, self.store.block_tokens
        if load is not None:
            seq.load_s = load.seconds
        if match is None or not self.store.is_usable:
            seq.miss = "disabled"
            return
        nodes = [(node, block_tokens) for node in match.nodes]
        if match.tail is not None:
            nodes.append((match.tail, match.tokens - len(match.nodes) * block_tokens))
        for node, tokens in nodes:
            source = load.sources.get(node.key, "device") if load is not None else "device"
            seq.sources[source] = seq.sources.get(source, 0) + tokens
            seq.cached_since = node.created_at
        depth = len(match.nodes)
        if depth < (seq.prompt_len - 1) // block_tokens:
            lost = self.store.tree.has_lost(seq.prompt.keys[depth])
            seq.miss = (load.miss if load is not None else None) or ("evicted" if lost else "never_seen")

    def _takes_room(self, seq: Sequence, lease: Lease) -> bool:
        """Take the room of what was loaded ahead for others; whether it is enough."""
        return self.mover is not None and self.mover.loader.yield_holds() and self._has_room(seq, lease)

    def _look_below(self, seq: Sequence, *, is_next: bool = False) -> None:
        """Start to bring up what the device lacks of a prompt; who is next is served before others."""
        self._end_load(seq)
        if is_next and self.mover is not None:
            self.mover.loader.yield_holds()
        if self.mover is not None and seq.parent is None and seq.cache.read and not seq.scores_prompt:
            seq.load = self.mover.begin(seq.prompt)

    def _end_load(self, seq: Sequence) -> None:
        if seq.load is not None and self.mover is not None:
            self.mover.loader.end(seq.load)
            seq.load = None

    def _withdraw(self, seq: Sequence) -> None:
        """Undo a start that could not get a single row."""
        if seq.status is Status.RUNNING:
            seq.status = Status.PREEMPTED
            self._leave_if_idle(seq)

    # -- settling ----------------------------------------------------------------------------------

    def settle(self, plan: StepPlan, output: StepOutput) -> list[Settled]:
        """Book a step that has run: append its tokens, publish full blocks, let go of what has ended.
        Returns what sequences that are still wanted have got; a token that comes after a sequence's end
        is dropped here."""
        self._retire_copies(plan)
        tokens, finite = output.tokens.tolist(), output.finite.tolist()
        results: list[Settled] = []
        row = 0
        for segment in plan.segments:
            seq, first_row = segment.sequence, row
            row += segment.logits
            seq.in_flight -= 1
            if seq.status is not Status.FINISHED:
                ok = all(finite[first_row:row])
                self._book(seq, segment, tokens[row - 1] if segment.sample else None, ok)
                results.append(
                    Settled(seq, segment.start, segment.count, first_row, segment.logits, segment.sample, ok)
                )
            self._leave_if_idle(seq)
        return results

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """Book a step that could not run: its sequences end; returns those that were still wanted."""
        self._retire_copies(plan)
        failed = []
        for segment in plan.segments:
            seq = segment.sequence
            seq.in_flight -= 1
            if seq.status is not Status.FINISHED:
                failed.append(seq)
                seq.status = Status.FINISHED
            self._leave_if_idle(seq)
        return failed

    def _book(self, seq: Sequence, segment: Segment, token: int | None, ok: bool) -> None:
        assert seq.lease is not None
        seq.settled = segment.start + segment.count
        if token is not None:
            seq.pending -= 1
            seq.tokens.append(token)
        if not ok:
            return
        if not seq.cache.write:
            self.store.pass_window(seq.lease, seq.settled)
            return
        kept = seq.settled if seq.cache.write_tokens is None else min(seq.settled, seq.cache.write_tokens)
        full = kept // self.store.block_tokens
        if full > len(seq.prompt.keys):
            seq.prompt.extend(seq.tokens)
        depth = seq.lease.node.depth
        if full > depth:
            seq.written_blocks += self.store.commit(seq.lease, seq.prompt, kept)
            self._write_blocks(seq, depth)
            if self.mover is not None and seq.cache.durable:
                self.mover.save(seq.lease.node, seq.cache.ttl_s)
        self.store.pass_window(seq.lease, seq.settled)

    def _leave_if_idle(self, seq: Sequence) -> None:
        """Take slot and blocks back from a finished or preempted sequence that no step names any more."""
        if seq.in_flight or seq.status is Status.RUNNING or seq.lease is None:
            return
        self.running.remove(seq)
        if self.mover is not None and seq.cache.durable:
            self.mover.touch(seq.lease.node, seq.cache.ttl_s)
            self.mover.writer.request_ended()
        self.store.release(seq.lease)
        self._free_slots.append(seq.slot)
        seq.lease, seq.slot = None, -1
        if seq.status is Status.PREEMPTED:
            seq.status = Status.WAITING
            seq.computed = seq.settled = 0
            assert seq.pending == 0, "a sequence left with a token in flight"
            self.add(seq)

    def _retire_copies(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self._copies_in_flight.remove(copy)
        self.store.drop_copies(plan.copies)

    # -- pieces ------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.store.block_tokens)

    def _write_blocks(self, seq: Sequence, first: int) -> None:
        assert seq.lease is not None
        for table, held in zip(self._tables.block_tables, seq.lease.blocks, strict=True):
            table[seq.slot, first : len(held)] = held[first:]

    def check_integrity(self) -> None:
        """Check slots and blocks against what sequences hold (see `KVStore.check_integrity`)."""
        leases = [s.lease for s in self.running if s.lease is not None]
        taken = self.mover.loader.taken() if self.mover is not None else []
        self.store.check_integrity(leases, self._copies_in_flight, taken)
        slots = sorted(self._free_slots + [s.slot for s in self.running])
        assert slots == list(range(self._tables.slots)), f"slots leak: {slots}"
