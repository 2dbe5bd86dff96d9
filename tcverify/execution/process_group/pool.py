"""Runs programs on a real process group: one process per rank, kept alive between programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import get_args

from tcverify.domains import FLOAT64, Domain
from tcverify.errors import ExecutorError, TcverifyError, UsageError
from tcverify.execution.executor import Comparison, Run
from tcverify.execution.interpreter import RankResult
from tcverify.execution.plan import check_supported, plans_of
from tcverify.execution.process_group.messages import Reply, encode_go, encode_request
from tcverify.execution.process_group.processes import RankGroup, RankGroupProtocol, RankLost, choose_core, name_ranks
from tcverify.execution.process_group.worker import DeviceType, backend_of
from tcverify.program import Program, program_id
from tcverify.registry.extensions import list_extension_state

#: Seconds that the other ranks get to come through once a node has raised on one: they may wait for it in a collective.
GRACE_SECONDS = 0.5

#: Bytes of unanswered requests that are sent ahead. They fit into a socket's buffer, so sending never waits for a rank that
#: waits for us to take its replies; a larger request is sent alone, when no rank has anything to say.
WINDOW_BYTES = 64 << 10


@dataclass(eq=False, slots=True)
class Ticket:
    """Programs on their way through a pool. Give it to `ProcessGroupPool.result`."""

    number: int
    programs: tuple[Program, ...]
    request: bytes
    domains: tuple[str, ...]
    replies: dict[int, Reply] = field(default_factory=dict)
    sent: bool = False
    done: bool = False
    failure: TcverifyError | None = None

    @property
    def _raised(self) -> bool:
        return any(reply.held for reply in self.replies.values())

    def __str__(self) -> str:
        first, last = program_id(self.programs[0]), program_id(self.programs[-1])
        return f"program {first}" if len(self.programs) == 1 else f"programs {first} (original) and {last} (rewritten)"


class ProcessGroupPool:
    """An executor on a real process group: gloo on the CPU; on CUDA devices NCCL, or gloo where ranks share a device.

    The ranks start at the first use and live until `close`; after any failure (a rank dies, a collective fails, the time
    limit is reached) all of them are killed, and the next use starts new ones. Not thread-safe.

    Args:
        world_size: number of ranks; programs must have as many.
        device: "cpu" or "cuda". With "cuda", rank r computes on device r modulo the number of devices.
        timeout: time limit for one program, or one pair, on the group, in seconds.
        core: the CPU core that all gloo ranks share (they are slower when spread); None takes the number of this worker, of
            a campaign or of pytest-xdist, or 0, modulo the cores that this process may use.
        start_group: starts the ranks: on this machine, or as torchrun has spread them (`StoreGroup`).

    Raises:
        UsageError: the arguments are not valid on this machine.
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: DeviceType = "cpu",
        timeout: float = 60.0,
        core: int | None = None,
        start_group: Callable[[int, DeviceType, int | None, float], RankGroupProtocol] = RankGroup,
    ) -> None:
        if world_size < 1:
            raise UsageError(f"a process group of {world_size} ranks cannot be")
        if device not in get_args(DeviceType):
            raise UsageError(f"'{device}' is not a device of process groups", "use cpu or cuda")
        if not 0 < timeout <= 86400:
            raise UsageError(f"a time-out of {timeout} s is not between 0 and 86400 s")
        backend = backend_of(device, world_size)
        self.name: str = "gloo (CUDA)" if (device, backend) == ("cuda", "gloo") else backend
        self.device = device
        self.world_size = world_size
        self.timeout = timeout
        self._core = choose_core(core) if device == "cpu" else None
        self._start_group = start_group
        self._group: RankGroupProtocol | None = None
        self._number = 0
        self._tickets: list[Ticket] = []  # not done yet, in the order in which the ranks serve them
        self._since = 0.0  # when the first of them became the first

    def __enter__(self) -> ProcessGroupPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the ranks. What is still in flight fails. The pool can be used again: that starts new ranks."""
        self._discard()
        for ticket in self._tickets:
            ticket.failure = ExecutorError(f"the pool was closed while it was to run {ticket}")
            ticket.done = True
        self._tickets.clear()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order; empty when they are not running."""
        return self._group.pids if self._group is not None else []

    # --------------------------------------------------------------------------------------------------------- running

    def start(self) -> None:
        """Start the ranks now, not at the first use.

        Raises:
            ExecutorError: they cannot be started: no such backend, no device, no memory.
        """
        if self._group is None:
            self._group = self._start_group(self.world_size, self.device, self._core, self.timeout)

    def run(self, program: Program, *, observe: bool = False, domain: Domain = FLOAT64) -> Run:
        """Run a program; outputs and observed values come back exactly. See `Executor.run`.

        When a node raises on some ranks and others then wait for them, the others' results stay empty.
        """
        ticket = self._enter((program,), (domain,), observe)
        self._finish(ticket)
        return self._collect(ticket, 0)

    def compare(self, original: Program, rewritten: Program, domain: Domain = FLOAT64) -> Comparison:
        """Run both versions and compare them in the ranks. Results hold digests in place of outputs. See `Executor.compare`."""
        return self.result(self.submit(original, rewritten, domain))

    def start_comparison(
        self, original: Program, rewritten: Program, domain: Domain = FLOAT64
    ) -> Callable[[], Comparison]:
        """See `Executor.start_comparison`."""
        ticket = self.submit(original, rewritten, domain)
        return lambda: self.result(ticket)

    def submit(self, original: Program, rewritten: Program, domain: Domain = FLOAT64) -> Ticket:
        """Start to compare two versions, behind whatever is in flight, and return at once.

        Raises:
            UnsupportedOp: an op has no meaning.
            ExecutorError: the ranks cannot be started, or a program cannot be sent.
        """
        if domain.carries:
            return self._enter((original, rewritten), (domain, domain), False)
        return self._enter((original, original, rewritten), (FLOAT64, domain, domain), False)

    def result(self, ticket: Ticket) -> Comparison:
        """Wait for a comparison. Raises as `compare` does."""
        self._finish(ticket)
        *reference, original, rewritten = [self._collect(ticket, version) for version in range(len(ticket.programs))]
        comparison = Comparison(self.name, original, rewritten, reference=reference[0] if reference else None)
        if len(ticket.replies) == self.world_size and not ticket._raised:
            comparison.deltas = [delta for rank in sorted(ticket.replies) for delta in ticket.replies[rank].deltas]
        return comparison

    def _enter(self, programs: tuple[Program, ...], domains: tuple[Domain, ...], observe: bool) -> Ticket:
        for program, domain in zip(programs, domains, strict=True):
            if program.world_size != self.world_size:
                raise UsageError(f"a program of {program.world_size} ranks cannot run on a pool of {self.world_size}")
            check_supported(plans_of(program, domain), domain)
        self._number += 1
        request = encode_request(self._number, programs, observe, domains)
        ticket = Ticket(self._number, programs, request, tuple(domain.name for domain in domains))
        self._tickets.append(ticket)
        try:
            self._send()
        except BaseException:
            self._drop(ticket)
            raise
        return ticket

    def _finish(self, ticket: Ticket) -> None:
        try:
            while not ticket.done:
                self._advance()
        except BaseException:
            self._drop(ticket)
            raise
        if ticket.failure is not None:
            raise ticket.failure

    def _collect(self, ticket: Ticket, version: int) -> Run:
        run = Run(self.name, [RankResult(rank) for rank in range(self.world_size)], domain=ticket.domains[version])
        for rank, reply in ticket.replies.items():
            if version < len(reply.results):
                run.ranks[rank] = reply.results[version]
        return run

    # ----------------------------------------------------------------------------------------------------- conversation

    def _send(self) -> None:
        """Send what may be sent; start the ranks when there are none."""
        if self._group is not None and not any(t.sent for t in self._tickets) and self._outdated(self._group):
            self._discard()  # while nothing ran: no program is to blame, and nothing is lost
        self.start()
        ahead = sum(len(t.request) for t in self._tickets if t.sent)
        for ticket in self._tickets:
            if ticket.sent:
                continue
            if ahead and ahead + len(ticket.request) > WINDOW_BYTES:
                break
            if ticket is self._tickets[0]:
                self._since = time.monotonic()
            ticket.sent = True
            ahead += len(ticket.request)
            if not self._tell(ticket.request, range(self.world_size)):
                break

    def _outdated(self, group: RankGroupProtocol) -> bool:
        """Whether new ranks are needed: one has died, or they lack an extension."""
        return group.extensions != list_extension_state() or group.lost(0) is not None

    def _tell(self, message: bytes, ranks: Iterable[int]) -> bool:
        """Send a message to these ranks; whether all of them took it."""
        if self._group is None:
            return False
        for rank in ranks:
            try:
                self._group.send(rank, message)
            except RankLost as lost:
                self._bury(lost)
                return False
            except TimeoutError:
                self._give_up()
                return False
        return True

    def _advance(self) -> None:
        """Take one reply, or notice an accident."""
        self._send()
        if self._group is None or not self._tickets:
            return
        first = self._tickets[0]
        limit = self._since + self.timeout
        if first._raised:
            limit = min(limit, time.monotonic() + GRACE_SECONDS)
        try:
            received = self._group.receive(limit)
        except RankLost as lost:
            self._bury(lost)
            return
        if received is None:
            if first._raised:  # the others wait for a rank that will not come: an observation, not an accident
                self._close_first()
                self._discard()
            else:
                self._give_up()
            return
        rank, reply = received
        ticket = next(t for t in self._tickets if t.number == reply.number)
        ticket.replies[rank] = reply
        if reply.failure is not None:
            self._collective_failed(ticket, rank, reply.failure)
        elif len(ticket.replies) == self.world_size:
            self._close_first()
            if any(each.left for each in ticket.replies.values()):
                self._discard()
            else:
                held = [rank for rank, each in ticket.replies.items() if each.held]
                self._tell(encode_go(ticket.number), held)

    def _close_first(self) -> None:
        """The first ticket has all the replies that it will get."""
        ticket = self._tickets.pop(0)
        ticket.failure = next((r.refusal for _, r in sorted(ticket.replies.items()) if r.refusal is not None), None)
        ticket.done = True
        self._since = time.monotonic()

    # -------------------------------------------------------------------------------------------------------- accidents

    def _bury(self, lost: RankLost) -> None:
        """A rank is gone: the first program that it had not answered is to blame."""
        blamed = next((t for t in self._tickets if t.sent and lost.rank not in t.replies), None)
        self._fail(blamed, f"rank {lost.rank} {lost.how}")

    def _collective_failed(self, ticket: Ticket, rank: int, failure: str) -> None:
        # A rank that dies breaks its peers' collectives: when one does, it is the cause.
        lost = self._group.lost(0.2) if self._group is not None else None
        if lost is not None:
            del ticket.replies[rank]
            self._bury(lost)
        else:
            self._fail(ticket, f"on rank {rank}, {failure}")

    def _give_up(self) -> None:
        first = self._tickets[0]
        silent = name_ranks(rank for rank in range(self.world_size) if rank not in first.replies)
        self._fail(first, f"{silent} had not answered after {self.timeout:g} s")

    def _fail(self, ticket: Ticket | None, what: str) -> None:
        """Kill the ranks; `ticket` fails, the others are run again by new ranks."""
        self._discard()
        if ticket is not None:
            self._tickets.remove(ticket)
            ticket.failure = ExecutorError(f"{self.name}: {what}, while running {ticket}")
            ticket.done = True

    def _discard(self) -> None:
        """Kill the ranks; what they had not finished will be run again by new ones."""
        if self._group is not None:
            self._group.kill()
            self._group = None
        for ticket in self._tickets:
            ticket.sent = False
            ticket.replies.clear()

    def _drop(self, ticket: Ticket) -> None:
        """Waiting for a ticket was cut short (Ctrl-C, ranks that do not start): forget it, and the ranks that work on it."""
        self._discard()
        if not ticket.done:
            self._tickets.remove(ticket)
            ticket.failure = ExecutorError(f"interrupted while running {ticket}")
            ticket.done = True
