"""The fair queue: who has had least goes next, among tenants first, then among their clients."""

from collections import Counter

from kvtierd.fair import SHARES_MAX, FairQueue, Flow


def serve(queue: FairQueue[str], costs: dict[Flow, float], times: int) -> list[Flow]:
    """Serve so many items of clients that always have another one; who they were."""
    order = []
    for _ in range(times):
        flow = queue.next_flow()
        item = queue.take(flow)
        queue.charge(flow, costs[flow])
        queue.put(flow, item)
        order.append(flow)
    return order


def test_clients_get_equal_shares_whatever_one_of_their_requests_costs() -> None:
    queue: FairQueue[str] = FairQueue()
    costs = {(1, 1): 1.0, (1, 2): 10.0, (1, 3): 2.5}
    for flow in costs:
        queue.put(flow, "work")
    had = Counter[Flow]()
    for flow in serve(queue, costs, 1400):
        had[flow] += costs[flow]  # type: ignore[assignment]
    assert max(had.values()) - min(had.values()) <= max(costs.values())


def test_a_tenant_with_many_clients_gets_no_more_than_one_with_a_single_client() -> None:
    queue: FairQueue[str] = FairQueue()
    flows = [(1, 1), *((2, client) for client in range(50))]
    for flow in flows:
        queue.put(flow, "work")
    served = Counter(tenant for tenant, _ in serve(queue, dict.fromkeys(flows, 1.0), 1000))
    assert served == {1: 500, 2: 500}


def test_who_was_idle_is_served_next_and_has_saved_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    costs = dict.fromkeys([(1, 1), (1, 2)], 1.0)
    queue.put((1, 1), "busy")
    serve(queue, costs, 1000)
    queue.put((1, 2), "seldom")
    order = serve(queue, costs, 100)
    assert order[:2].count((1, 2)) == 1
    assert order.count((1, 2)) == 50


def test_what_was_had_past_the_queue_counts() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.charge((1, 1), 5.0)
    queue.put((1, 1), "heavy")
    queue.put((1, 2), "light")
    assert queue.next_flow() == (1, 2)


def test_the_items_of_a_client_keep_their_order() -> None:
    queue: FairQueue[int] = FairQueue()
    for item in range(5):
        queue.put((1, 1), item)
    found = []
    while queue:
        flow = queue.next_flow()
        assert queue.first(flow) == queue._waiting[1][1][0]
        found.append(queue.take(flow))
    assert found == [0, 1, 2, 3, 4]


def test_clients_that_come_and_go_do_not_pile_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for client in range(3 * SHARES_MAX):
        queue.put((1, client), "once")
        flow = queue.next_flow()
        queue.take(flow)
        queue.charge(flow, 1.0)
    assert len(queue._clients[1]._had) <= SHARES_MAX + 1
