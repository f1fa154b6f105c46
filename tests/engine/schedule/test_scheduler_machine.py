"""A state machine drives scheduler, cache and a self-checking device through every interleaving it finds."""

from __future__ import annotations

from collections import deque

from fakes import FakeClock, FakeExecutor, expected_output, kv_group
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manual_workers import ManualWorkers

from artesian.cache import CacheConfig, KVStore
from artesian.cache.mover import Mover
from artesian.cache.tiers import Found, Kind, TierFault
from artesian.cache.tiers.host import HostTier
from artesian.engine import CachePolicy
from artesian.engine.request import Sequence, Settled, Status
from artesian.engine.schedule import CostModel, ProgramCost, Scheduler, StepPlan
from artesian.kernels.batch import SlotSampling, SlotTables, StepOutput

VOCAB, MAX_LEN, SLOTS, STOP = 5, 48, 3, frozenset({0})
SHARED = [[1, 2, 3, 4, 1, 2, 3, 4, 4, 4, 4, 3], [2] * 9, [3, 1]]


class FlakyTier(HostTier):
    """A tier whose reads fail when told."""

    fails = False

    def read(self, found: Found, kind: Kind, identity: bytes, content: bytes, out: memoryview) -> None:
        if self.fails:
            out[:] = b"\xff" * len(out)
            raise TierFault("told to fail")
        super().read(found, kind, identity, content, out)


POLICIES = [
    CachePolicy(), CachePolicy(), CachePolicy(read=False), CachePolicy(write=False),
    CachePolicy(durable=False), CachePolicy(write_tokens=6),
]  # fmt: skip


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        windowed=st.booleans(), blocks=st.integers(13, 30), caching=st.booleans(), below=st.booleans(),
        tier_blocks=st.integers(3, 60),
    )  # fmt: skip
    def build(self, windowed: bool, blocks: int, caching: bool, below: bool, tier_blocks: int) -> None:
        groups = [kv_group()] + ([kv_group("window", window=6)] if windowed else [])
        kv_blocks = [blocks] + ([blocks - 1] if windowed else [])
        self.tables = SlotTables(SLOTS, MAX_LEN, groups)
        self.store = KVStore(groups, kv_blocks, "digest", CacheConfig(enable_prefix_caching=caching))
        cost = CostModel(ProgramCost(1000, 100), overhead_ms=0.1, flops_per_ms=10_000)
        self.scheduler = Scheduler(
            self.store, self.tables, cost, step_budget_ms=2.0, max_rows=20, max_logits_rows=12
        )
        self.device = FakeExecutor(self.tables, groups, kv_blocks, VOCAB)
        self.workers = ManualWorkers()
        self.tier = FlakyTier(
            budget_bytes=tier_blocks * sum(g.block_bytes for g in groups),
            default_ttl_s=60.0,
            clock=FakeClock(),
        )
        if below:
            self.scheduler.mover = Mover(
                self.store, [self.tier], self.device, self.workers, default_ttl_s=60.0,
                compute_s=lambda start, count: 1.0, reserved_blocks=self.scheduler.reserved_blocks,
                on_ready=lambda: None, clock=FakeClock(),
            )  # fmt: skip
        self.launched: deque[StepPlan] = deque()
        self.ran: deque[tuple[StepPlan, StepOutput]] = deque()
        self.sequences: list[Sequence] = []
        self.aborted: set[Sequence] = set()

    @rule(
        prefix=st.sampled_from(SHARED), rest=st.lists(st.integers(0, 4), max_size=14),
        wanted=st.integers(0, 12), n=st.integers(1, 3), salt=st.sampled_from(["", "a"]),
        rank=st.integers(-2, 2), scored=st.booleans(), policy=st.sampled_from(POLICIES),
    )  # fmt: skip
    def submit(
        self, prefix: list[int], rest: list[int], wanted: int, n: int, salt: str, rank: int, scored: bool,
        policy: CachePolicy,
    ) -> None:  # fmt: skip
        prompt = prefix + rest
        parent: Sequence | None = None
        for index in range(n):
            seq = Sequence(
                request_id=str(len(self.sequences)), index=index, tokens=list(prompt), prompt_len=len(prompt),
                max_len=len(prompt) + wanted, sampling=SlotSampling(), prompt=self.store.prompt(prompt, salt),
                order=float(len(self.sequences) + 3 * rank), stop_ids=STOP,
                prompt_logprobs=0 if scored and index == 0 else None, parent=parent, cache=policy,
            )  # fmt: skip
            parent = parent or seq
            self.sequences.append(seq)
            self.scheduler.add(seq)

    @precondition(lambda self: self.sequences)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        seq = self.sequences[pick % len(self.sequences)]
        if seq.status is not Status.FINISHED:
            self.aborted.add(seq)
        self.scheduler.finish(seq)

    @precondition(lambda self: len(self.launched) + len(self.ran) < 2)
    @rule()
    def plan(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.launched.append(plan)

    @precondition(lambda self: self.launched)
    @rule()
    def run_device(self) -> None:
        plan = self.launched.popleft()
        output = StepOutput.empty(plan.batch.logits_rows, plan.batch.top_logprobs)
        self.device.step(plan.batch, output)
        self.ran.append((plan, output))

    @precondition(lambda self: self.ran)
    @rule()
    def settle(self) -> None:
        for settled in self.scheduler.settle(*self.ran.popleft()):
            self._on_settled(settled)

    def _on_settled(self, settled: Settled) -> None:
        seq = settled.sequence
        done = len(seq.tokens) >= seq.max_len and seq.settled >= seq.prompt_len
        if done or (settled.sampled and seq.tokens[-1] in STOP):
            self.scheduler.finish(seq)

    @precondition(lambda self: self.workers.reads)
    @rule(pick=st.integers(0, 1000), fails=st.booleans())
    def run_a_read(self, pick: int, fails: bool) -> None:
        self.tier.fails = fails and pick % 3 == 0
        self.workers.run_read(pick)

    @precondition(lambda self: self.workers.writes)
    @rule()
    def run_a_write(self) -> None:
        self.workers.run_write()

    @precondition(lambda self: self.workers.results)
    @rule(pick=st.integers(0, 1000))
    def deliver_a_result(self, pick: int) -> None:
        self.workers.deliver(pick)

    @precondition(lambda self: self.workers.timers)
    @rule(pick=st.integers(0, 1000))
    def fire_a_timer(self, pick: int) -> None:
        timers = self.workers.timers
        timers[pick % len(timers)].fire()

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if self.ran:
                self.settle()
            elif self.launched:
                self.run_device()
            else:
                self.workers.run_all()
                self.plan()
                if not (self.launched or self.workers.reads or self.workers.results):
                    break
        for timer in list(self.workers.timers):
            timer.fire()
        self.workers.run_all()
        assert not self.scheduler.has_work(), "the scheduler is stuck with work left"
        self.scheduler.check_integrity()
        assert not self.scheduler.running and all(p.available == p.total for p in self.store.pools)
        for seq in self.sequences:
            want = expected_output(seq.tokens[: seq.prompt_len], seq.max_len - seq.prompt_len, VOCAB, STOP)
            got = seq.tokens[seq.prompt_len :]
            assert got == (want[: len(got)] if seq in self.aborted else want)


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerMachine = SchedulerMachine.TestCase
