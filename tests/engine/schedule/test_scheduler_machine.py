"""A state machine drives scheduler, cache and a self-checking device through every interleaving it finds."""

from __future__ import annotations

from collections import deque

from fakes import FakeExecutor, expected_output, kv_group
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from artesian.cache import CacheConfig, KVStore
from artesian.engine.request import Sequence, Settled, Status
from artesian.engine.schedule import CostModel, ProgramCost, Scheduler, StepPlan
from artesian.kernels.batch import SlotSampling, SlotTables, StepOutput

VOCAB, MAX_LEN, SLOTS, STOP = 5, 48, 3, frozenset({0})
SHARED = [[1, 2, 3, 4, 1, 2, 3, 4, 4, 4, 4, 3], [2] * 9, [3, 1]]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(windowed=st.booleans(), blocks=st.integers(13, 30), caching=st.booleans())
    def build(self, windowed: bool, blocks: int, caching: bool) -> None:
        groups = [kv_group()] + ([kv_group("window", window=6)] if windowed else [])
        kv_blocks = [blocks] + ([blocks - 1] if windowed else [])
        self.tables = SlotTables(SLOTS, MAX_LEN, groups)
        self.store = KVStore(groups, kv_blocks, "digest", CacheConfig(enable_prefix_caching=caching))
        cost = CostModel(ProgramCost(1000, 100), overhead_ms=0.1, flops_per_ms=10_000)
        self.scheduler = Scheduler(
            self.store, self.tables, cost, step_budget_ms=2.0, max_rows=20, max_logits_rows=12
        )
        self.device = FakeExecutor(self.tables, groups, kv_blocks, VOCAB)
        self.launched: deque[StepPlan] = deque()
        self.ran: deque[tuple[StepPlan, StepOutput]] = deque()
        self.sequences: list[Sequence] = []
        self.aborted: set[Sequence] = set()

    @rule(
        prefix=st.sampled_from(SHARED), rest=st.lists(st.integers(0, 4), max_size=14),
        wanted=st.integers(0, 12), n=st.integers(1, 3), salt=st.sampled_from(["", "a"]),
        rank=st.integers(-2, 2), scored=st.booleans(),
    )  # fmt: skip
    def submit(
        self, prefix: list[int], rest: list[int], wanted: int, n: int, salt: str, rank: int, scored: bool
    ) -> None:
        prompt = prefix + rest
        parent: Sequence | None = None
        for index in range(n):
            seq = Sequence(
                request_id=str(len(self.sequences)), index=index, tokens=list(prompt), prompt_len=len(prompt),
                max_len=len(prompt) + wanted, sampling=SlotSampling(), prompt=self.store.prompt(prompt, salt),
                order=float(len(self.sequences) + 3 * rank), stop_ids=STOP,
                prompt_logprobs=0 if scored and index == 0 else None, parent=parent,
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
                self.plan()
                if not self.launched:
                    break
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
