"""Passes: the order in which the batches come, against orders seen in RLlib's buffer."""

import itertools
import string

import pytest

from headrace.agents.passes import PassBuffer
from headrace.agents.types import Stopped


def emissions(count, slots, passes, warm_start=False):
    """Names of the batches in order, each with a star when it is given up."""
    buffer = PassBuffer(iter(string.ascii_uppercase).__next__, slots, passes, warm_start=warm_start)
    return " ".join(batch + "*" * last for batch, last in (buffer.next() for _ in range(count)))


@pytest.mark.parametrize(
    ("slots", "passes", "warm_start", "order"),
    [
        (1, 1, False, "A* B* C*"),
        (1, 3, False, "A A A* B B B*"),
        (2, 2, False, "A B A* B* C D C* D*"),
        (3, 2, False, "A B C A* B* C* D E F"),
        (2, 2, True, "A* B C B* C* D E D* E*"),
        (3, 3, True, "A* B C D B* C D E C* D*"),
        (4, 1, False, "A* B* C* D* E*"),
    ],
)
def test_order(slots, passes, warm_start, order):
    assert emissions(len(order.split()), slots, passes, warm_start) == order


@pytest.mark.parametrize(("slots", "passes"), [*itertools.product((1, 2, 3, 5), (1, 2, 4))])
def test_every_batch_gets_its_passes_in_the_order_of_arrival(slots, passes):
    order = emissions(4 * slots * passes, slots, passes).replace("*", "").split()
    assert all(order.count(batch) == passes for batch in set(order))
    assert sorted(set(order)) == list(dict.fromkeys(order))


def test_held_are_those_with_passes_left():
    buffer = PassBuffer(iter("ABCD").__next__, slots=2, passes=2)
    held = []
    for _ in range(5):
        buffer.next()
        held.append("".join(buffer.held))
    assert held == ["A", "AB", "B", "", "C"]


def test_failed_take_changes_nothing():
    answers = iter(["A", Stopped(), "B"])

    def take():
        answer = next(answers)
        if isinstance(answer, Stopped):
            raise answer
        return answer

    buffer = PassBuffer(take, slots=2, passes=2)
    assert buffer.next() == ("A", False)
    with pytest.raises(Stopped):
        buffer.next()
    assert [buffer.next()[0] for _ in range(3)] == ["B", "A", "B"]
