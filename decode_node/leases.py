"""The leases of a decode node, found by id and by each branch that they are still wanted for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from connector.handoff import ReceiverState
from decode_node.lease import Lease
from node.events import RouterId
from proto.attempt_key import AttemptKey, BranchKey


class Leases:
    """A lease that is over is in nobody's way, but may be kept by its id for a while, to answer a late Commit."""

    def __init__(self) -> None:
        self._by_id: dict[int, Lease] = {}
        self._holders: dict[AttemptKey, Lease] = {}  # not yet over

    def __len__(self) -> int:
        """Leases that are not over."""
        return len({lease.lease_id for lease in self._holders.values()})

    def __getitem__(self, lease_id: int) -> Lease:
        return self._by_id[lease_id]

    def get(self, lease_id: int) -> Lease | None:
        """The lease of this id, however far it is."""
        return self._by_id.get(lease_id)

    def add(self, lease: Lease) -> None:
        """Keep a new lease, for each of its open branches."""
        self._by_id[lease.lease_id] = lease
        # In the order of its keys: that of a set is another one in each process.
        self._holders.update((key, lease) for key in lease.keys if key in lease.open)

    def of_any(self, keys: Iterable[AttemptKey]) -> Lease | None:
        """The lease that one of these attempts of branches is open in."""
        return next((self._holders[key] for key in keys if key in self._holders), None)

    def older(self, floors: Mapping[BranchKey, int]) -> list[tuple[Lease, AttemptKey]]:
        """Attempts below their branch's floor, and where each is open."""
        return [(lease, key) for key, lease in self._holders.items() if key.attempt < floors.get(key.branch, 0)]

    def of_router(self, router: RouterId) -> list[Lease]:
        """All that are not over and that this router's attempts asked for."""
        return list({each.lease_id: each for each in self._holders.values() if each.router == router}.values())

    def not_over(self) -> list[Lease]:
        """All that may still become sequences."""
        return list({each.lease_id: each for each in self._holders.values()}.values())

    @property
    def has_blocks(self) -> bool:
        """Whether blocks are leased, or quarantined, for any."""
        return any(lease.state is not ReceiverState.RELEASED for lease in self._by_id.values())

    def close(self, lease: Lease, key: AttemptKey) -> None:
        """The branch is not, or no longer, the lease's business."""
        lease.open.discard(key)
        del self._holders[key]

    def forget(self, lease: Lease) -> None:
        """Nothing asks for this id any more."""
        del self._by_id[lease.lease_id]

    def remaining_tokens(self) -> list[int]:
        """How many tokens each branch that is open in a lease may still say."""
        return [lease.max_total_tokens - lease.num_tokens - 1 for lease in self._holders.values()]

    def states(self) -> dict[str, int]:
        """How many there are by state."""
        return dict(Counter(lease.state.name for lease in self._by_id.values()))

    def num_blocks(self) -> int:
        """Blocks that are leased or quarantined for leases."""
        leases = [lease for lease in self._by_id.values() if lease.state is not ReceiverState.RELEASED]
        return sum(len(lease.blocks.leased) for lease in leases)
